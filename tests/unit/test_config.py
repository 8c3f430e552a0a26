"""The quantization_config that each reader demands, literally, and the text around it untouched."""

from __future__ import annotations

import json

import pytest

from fp8fs.core import config_diffusers, config_vllm
from fp8fs.core.json_text import set_key
from tests.planning import LLM, checkpoint, linears, make_plan

IGNORED = ["model.embed_tokens", "lm_head", "model.embed_tokens"]
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
    "ignore": ["model.embed_tokens", "lm_head"],
}


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("per_channel", COMPRESSED),
        (
            "per_tensor",
            {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "ignored_layers": ["model.embed_tokens", "lm_head"],
                "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
            },
        ),
        (
            "block",
            {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
            },
        ),
    ],
)
def test_transformers_dialects(scheme: str, expected: dict[str, object]) -> None:
    """A transformers model's config has exactly the keys that vLLM and transformers read."""
    assert config_vllm.quantization_config(scheme, IGNORED) == expected


@pytest.mark.parametrize(
    ("scheme", "more"), [("per_tensor", {}), ("block_free", {"weight_block_size": [128, 128]})]
)
def test_diffusers_dialects(scheme: str, more: dict[str, object]) -> None:
    """A pipeline component's config has exactly the keyword arguments of vLLM-Omni's Fp8Config."""
    assert config_diffusers.quantization_config(scheme, ["proj_out", "proj_out"]) == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "is_checkpoint_fp8_serialized": True,
        "ignored_layers": ["proj_out"],
        **more,
    }


@pytest.mark.parametrize("module", [config_vllm, config_diffusers])
def test_the_given_config_is_not_changed(module: object) -> None:
    """A new dict comes out; the one that went in is as it was."""
    config: dict[str, object] = {"a": 1, "quantization_config": None}
    made = module.with_quantization(config, "per_tensor", [])  # type: ignore[attr-defined]
    assert config == {"a": 1, "quantization_config": None}
    assert made["a"] == 1
    assert made["quantization_config"]["quant_method"] == "fp8"


def test_lm_head_is_ignored_even_if_tied() -> None:
    """A transformers model without an lm_head tensor still lists it; a pipeline never does."""
    assert config_vllm.quantization_config("block", [])["modules_to_not_convert"] == ["lm_head"]
    assert config_diffusers.quantization_config("block", [])["ignored_layers"] == []


def test_every_kept_weight_is_ignored() -> None:
    """Kept *.weight of two dimensions and more are listed in source order; vectors and buffers are not.

    Behind them, what the model without a head calls those that may be linears.
    """
    shapes = {
        "model.embed_tokens.weight": ("BF16", (64, 32)),
        **linears("model.layers.0.mlp.gate", "model.layers.0.mlp.fc"),
        "model.layers.0.norm.weight": ("BF16", (64,)),
        "model.layers.0.conv.weight": ("BF16", (64, 1, 4)),
        "model.layers.0.table": ("BF16", (2, 64)),
        "model.layers.1.mlp.experts.gate_up_proj": ("BF16", (4, 64, 32)),
    }
    planned = make_plan(checkpoint({"model.safetensors": shapes}))
    config = json.loads(planned.entries["config.json"].content)
    assert config["quantization_config"]["ignore"] == [
        "model.embed_tokens",
        "model.layers.0.mlp.gate",
        "model.layers.0.conv",
        "model.layers.1.mlp.experts",
        "layers.0.mlp.gate",
        "layers.1.mlp.experts",
        "lm_head",
    ]
    assert {k: v for k, v in config.items() if k != "quantization_config"} == LLM["config.json"]


VALUE = {"m": "f", "n": [1]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{\n  "z": 1.0,\n  "a": "é"\n}\n',
            '{\n  "z": 1.0,\n  "a": "é",\n  "q": {\n    "m": "f",\n    "n": [\n      1\n    ]\n  }\n}\n',
        ),
        ('{"z":1e3,"a":[]}', '{"z":1e3,"a":[],"q":{"m":"f","n":[1]}}'),
        ('{"z": 1, "a": {}}', '{"z": 1, "a": {}, "q": {"m": "f", "n": [1]}}'),
        ('{"q": null, "a": NaN}', '{"q": {"m": "f", "n": [1]}, "a": NaN}'),
        (
            '{\r\n\t"q": {"old": [1, "}"]},\r\n\t"a": "\\"{"\r\n}',
            '{\r\n\t"q": {\r\n\t\t"m": "f",\r\n\t\t"n": [\r\n\t\t\t1\r\n\t\t]\r\n\t},\r\n\t"a": "\\"{"\r\n}',
        ),
        ("{}", '{"q": {"m": "f", "n": [1]}}'),
        ("\ufeff{ }", '\ufeff{"q": {"m": "f", "n": [1]} }'),
    ],
)
def test_the_text_around_the_key_stays(text: str, expected: str) -> None:
    """Only the key's own text is added or replaced, in the style of what surrounds it."""
    assert set_key(text.encode(), "q", VALUE).decode() == expected


def test_a_key_that_occurs_twice_is_written_once() -> None:
    """Where two members have the key no edit is certain, so the object is encoded anew."""
    assert json.loads(set_key(b'{"q": 1, "b": 2, "q": 3}', "q", 4)) == {"q": 4, "b": 2}


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff{}", b"1"])
def test_what_is_no_object_is_refused(text: bytes) -> None:
    """Only a JSON object can take a key."""
    with pytest.raises(ValueError, match=r".+"):
        set_key(text, "q", 1)
