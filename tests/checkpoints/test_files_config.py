"""config.json as people have it: only the quantization key is added, every other byte stays where it was."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8fs.errors import SourceInvalidError
from tests.acceptance.harness import Fp8fs
from tests.builders import named, write_bytes, write_files, write_json
from tests.checkpoints.looks import DIT, LLM, SCHEMES, check_files, layer, look

FILE = "model.safetensors"
A = layer(0)
KEY = "quantization_config"
HEAD = '"architectures": ["TinyForCausalLM"], "model_type": "tiny"'

TEXTS: dict[str, bytes] = {
    "two spaces": b'{\n  "architectures": [\n    "TinyForCausalLM"\n  ],\n  "model_type": "tiny"\n}\n',
    "four spaces": b'{\n    "z": 1,\n    "architectures": ["TinyForCausalLM"],\n    "a": 2\n}\n',
    "tabs": b'{\n\t"architectures": ["TinyForCausalLM"]\n}\n',
    "one line": b'{"architectures":["TinyForCausalLM"],"model_type":"tiny"}',
    "one line with spaces": f"{{{HEAD}}}".encode(),
    "no order": b'{"vocab_size": 1, "model_type": "tiny", "architectures": ["X"], "_name": ""}\n',
    "ragged": b'{ "architectures":\n["TinyForCausalLM"]   ,\n\n\n      "a" :1\n , "b":\n2}  \n\n',
    "CRLF": b'{\r\n  "architectures": ["TinyForCausalLM"],\r\n  "a": 1\r\n}\r\n',
    "no newline at the end": b'{\n  "architectures": ["TinyForCausalLM"]\n}',
    "BOM": b'\xef\xbb\xbf{\n  "architectures": ["TinyForCausalLM"]\n}\n',
    "NaN and Infinity": f'{{{HEAD}, "a": NaN, "b": [Infinity, -Infinity]}}\n'.encode(),
    "numbers of every kind": f'{{{HEAD}, "eps": 1e-05, "f": 1.0, "g": 1E5, "h": 12345678901234567890123, "i": -0.0}}'.encode(),
    "escapes and unicode": f'{{{HEAD}, "a": "\\u00e9\\/é\\ud83e\\udde0🧠", "b": "\\""}}'.encode(),
    "half a surrogate pair": f'{{{HEAD}, "a": "\\ud800"}}'.encode(),
    "nested text_config": f'{{{HEAD}, "text_config": {{"{KEY}": null, "dtype": "bfloat16"}}, "vision_config": {{}}}}'.encode(),
    "torch_dtype": f'{{{HEAD}, "torch_dtype": "bfloat16"}}'.encode(),
    "dtype": f'{{{HEAD}, "dtype": "float16"}}'.encode(),
    "braces in strings": f'{{{HEAD}, "t": "}}{{,\\"{KEY}\\": 1"}}'.encode(),
    "long": f'{{{HEAD}, "id2label": {{'.encode()
    + b", ".join(b'"%d": "LABEL_%d"' % (n, n) for n in range(5000))
    + b"}}\n",
}


def write(src: Path, text: bytes | None) -> Path:
    write_files(src, {FILE: named(A)})
    if text is not None:
        write_bytes(src / "config.json", text)
    return src


def load(text: bytes) -> Any:
    return json.loads(text.decode("utf-8-sig"))


def same(one: object, other: object) -> bool:
    """Equal as JSON texts, so that NaN equals itself and the order of keys counts."""
    return json.dumps(one) == json.dumps(other)


@pytest.mark.parametrize("kind", TEXTS)
def test_only_one_key_is_added(tmp_path: Path, kind: str) -> None:
    """The text without one inserted run is the source's, byte for byte; parsed, it is the source and the key, last."""
    shown = look(write(tmp_path, TEXTS[kind])).text("config.json")
    inserted = len(shown) - len(TEXTS[kind])
    start = next(i for i, (a, b) in enumerate(zip(shown, TEXTS[kind], strict=False)) if a != b)
    assert TEXTS[kind][:start] + shown[start : start + inserted] + TEXTS[kind][start:] == shown
    before, after = load(TEXTS[kind]), load(shown)
    assert list(after) == [*before, KEY]
    assert after[KEY]["quant_method"] == "compressed-tensors"
    del after[KEY]
    assert same(after, before)


def test_what_is_added_looks_like_what_is_around_it(tmp_path: Path) -> None:
    """Line ends, and indentation level by level, are the text's; what was one line stays one."""

    def shown(kind: str) -> bytes:
        return look(write(tmp_path / kind, TEXTS[kind])).text("config.json")

    crlf = shown("CRLF")
    assert crlf.count(b"\n") == crlf.count(b"\r\n") > TEXTS["CRLF"].count(b"\n")
    for kind, unit in (("two spaces", b"  "), ("four spaces", b"    "), ("tabs", b"\t")):
        added = shown(kind).partition(KEY.encode())[2].splitlines()[1:-1]
        indents = {line[: len(line) - len(line.lstrip())] for line in added}
        assert {unit, unit * 2} <= indents <= {unit * n for n in range(1, 9)}, kind
    for kind in ("one line", "one line with spaces"):
        assert b"\n" not in shown(kind)
    assert b", " not in shown("one line")
    assert b'": ' not in shown("one line")


NULLS = {
    "last": f'{{\n  {HEAD},\n  "{KEY}": null\n}}\n',
    "first": f'{{"{KEY}": null, {HEAD}}}',
    "spaced": f'{{\n\t"{KEY}"  :\n\t\tnull ,\n\t{HEAD} }}',
}


@pytest.mark.parametrize("kind", NULLS)
def test_a_null_is_replaced_in_its_place(tmp_path: Path, kind: str) -> None:
    """quantization_config: null says nothing; its place is kept, and all around it."""
    text = NULLS[kind]
    shown = look(write(tmp_path, text.encode())).text("config.json").decode()
    before, after = text.split("null")
    assert shown.startswith(before)
    assert shown.endswith(after)
    assert list(load(shown.encode())) == list(load(text.encode()))


def test_a_key_stated_twice_is_stated_once(tmp_path: Path) -> None:
    """The last of equal keys counts for every reader; two nulls become one value."""
    text = f'{{"{KEY}": null, {HEAD}, "{KEY}": null}}'.encode()
    shown = look(write(tmp_path, text)).text("config.json")
    assert shown.count(f'"{KEY}"'.encode()) == 1
    assert load(shown)[KEY]["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("config", [LLM, DIT], ids=["transformers", "diffusers"])
def test_the_diff_is_one_block(tmp_path: Path, config: dict[str, object], scheme: str) -> None:
    """What a person sees in a diff: the added key, and the comma before it."""
    write_files(tmp_path, {FILE: named("blocks.0.ffn.2.weight", A)}, {**config, "last": 1})
    before = (tmp_path / "config.json").read_text().splitlines()
    after = look(tmp_path, scheme=scheme).text("config.json").decode().splitlines()
    lost = [line for line in difflib.ndiff(before, after) if line.startswith("- ")]
    assert lost == ['-   "last": 1']


@pytest.mark.fuse
def test_odd_configs_through_the_mount(mount: Callable[..., Path], place: Path) -> None:
    """Read from the mount they are the planned bytes; other JSON files are the source's."""
    src = place / "src"
    for number, (kind, text) in enumerate(TEXTS.items()):
        write(src / str(number), text)
        write_bytes(src / str(number) / "generation_config.json", text)
        assert kind
    dst = mount(src)
    planned = look(src)
    for number, text in enumerate(TEXTS.values()):
        shown = (dst / str(number) / "config.json").read_bytes()
        assert shown == planned.text(f"{number}/config.json")
        assert same({k: v for k, v in load(shown).items() if k != KEY}, load(text))
        assert (dst / str(number) / "generation_config.json").read_bytes() == text


# --- none, or one that says nothing


@pytest.mark.parametrize(
    "text", [None, b'{"dim": 64}', b"{}"], ids=["missing", "of no class", "empty"]
)
def test_raw_weights_are_served_with_a_warning(tmp_path: Path, text: bytes | None) -> None:
    """Quantized as asked; no reader can tell, and plan says so. A config that names no class is left alone."""
    seen = look(write(tmp_path, text))
    assert seen.quantized == {A}
    assert seen.warned("no config.json that names a model class", "no reader is told")
    if text is not None:
        assert seen.plan.entries["config.json"].kind == "source"
    else:
        assert seen.names == [FILE]


@pytest.mark.fuse
def test_raw_weights_through_the_mount(
    mount: Callable[..., Path], fp8fs: Fp8fs, place: Path
) -> None:
    """The warning reaches the command line, and the shard is what the oracle says."""
    src = write(place / "src", None)
    dst = mount(src)
    check_files(dst, {FILE: named(A)}, {A}, "per_channel")
    assert "no reader is told that the weights are FP8" in str(fp8fs.json("plan", src)["warnings"])
    assert "no reader is told that the weights are FP8" in fp8fs.run("plan", src).stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "config.json: not JSON"),
        (b"{", "config.json: not JSON"),
        (b'{"a": 1,}', "config.json: not JSON"),
        (b"[]", "config.json: not a JSON object"),
        (b'{"a": "\xff"}', "config.json: not JSON"),
        ('{"architectures": ["X"]}'.encode("utf-16"), "config.json: not JSON"),
    ],
)
def test_a_config_that_no_reader_takes_is_refused(tmp_path: Path, text: bytes, said: str) -> None:
    """UTF-16 included, which Python's json would take from bytes, but loaders open as UTF-8."""
    with pytest.raises(SourceInvalidError) as caught:
        look(write(tmp_path, text))
    assert caught.value.what.startswith(said)


def test_a_config_that_says_quantized_refuses_by_its_method(tmp_path: Path) -> None:
    """Already quantized, at the top or nested: the reason names the key and the method."""
    for config in (
        {**LLM, KEY: {"quant_method": "awq"}},
        {**LLM, "text_config": {KEY: {"quant_method": "awq"}}},
    ):
        write_json(write(tmp_path, None) / "config.json", config)
        with pytest.raises(SourceInvalidError, match=r'quantization_config \(quant_method "awq"\)'):
            look(tmp_path)
