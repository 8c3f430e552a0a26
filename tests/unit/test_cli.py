"""The command line without a mount: words, exit codes, JSON, sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from fp8fs import __version__
from fp8fs.cli import main, status
from fp8fs.cli.app import app
from fp8fs.cli.output import format_bytes, format_duration
from fp8fs.cli.status import Request, describe, quick_request
from fp8fs.cli.stores import _size
from fp8fs.errors import MountPointError, UsageError
from tests.builders import llama_like, wan_like

RECIPE_OPTIONS = {
    *("--scheme", "--names", "--component", "--keep", "--quantize", "--split-experts"),
    "--store",
}


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8FS_STORE", str(tmp_path / "store"))


def options_of(command: str) -> set[str]:
    """Every spelling of every option of one command."""
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {word for parameter in found.params for word in parameter.opts if word.startswith("-")}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """``--version`` prints the package's version."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fp8fs {__version__}\n"


@pytest.mark.parametrize("command", ["mount", "plan", "build", "path", "verify", "run"])
def test_recipe_options_are_the_same_everywhere(command: str) -> None:
    """Whatever takes a recipe takes all of it."""
    assert options_of(command) >= RECIPE_OPTIONS


@pytest.mark.parametrize(
    "command",
    [
        "mount",
        "unmount",
        "umount",
        "plan",
        "build",
        "path",
        "status",
        "verify",
        "ls",
        "rm",
        "gc",
        "doctor",
        "run",
    ],
)
def test_json_and_quiet_are_everywhere(command: str) -> None:
    """Every command that has a result of its own has --json and --quiet."""
    assert options_of(command) >= {"--json", "--quiet"}


MISTAKES = [
    (["nonesuch"], "no such command 'nonesuch'", "fp8fs --help"),
    (["plan"], "missing argument 'SRC'", "fp8fs plan --help"),
    (["plan", "x", "--nonesuch"], "no such option: --nonesuch", "fp8fs plan --help"),
    (["build", "x", "--workers", "two"], "'--workers'", "fp8fs build --help"),
    (["build", "x", "--workers", "257"], "'--workers'", "fp8fs build --help"),
    (["plan", "x", "--scan", "--workers", "99999"], "'--workers'", "fp8fs plan --help"),
    (["run", "x", "--workers", "-1", "--", "ls", "{}"], "'--workers'", "fp8fs run --help"),
    (["gc", "--quota", "inf"], '"inf" is not a size', "500G"),
    (["gc", "--quota", "1e400"], '"1e400" is not a size', "500G"),
    (["gc", "--quota", "nan"], '"nan" is not a size', "500G"),
    (["gc", "--quota=-5G"], '"-5G" is not a size', "500G"),
    (["mount", "x", "y", "--store"], "'--store' requires an argument", "fp8fs"),
    (["status", "a", "b"], "unexpected extra argument", "fp8fs status --help"),
    (
        ["run", "--shceme", "block", "x", "--", "ls", "{}"],
        "no such option: --shceme",
        "come after --",
    ),
    (["run", "x", "ls", "-l", "{}"], "no such option: -l", "come after --"),
    (["run", "x", "--", "nonesuch", "{}"], 'no command "nonesuch"', "PATH"),
]


@pytest.mark.parametrize(("words", "what", "hint"), MISTAKES)
def test_usage_mistakes_are_errors_like_others(
    words: list[str], what: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command line that cannot be read: one line on stderr, exit 2, and with --json the document."""
    assert main(words) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("error: ")
    assert seen.err.count("\n") == 1
    at = words.index("--") if "--" in words else len(words)
    if words[-1] != "--store":
        assert main([*words[:at], "--json", *words[at:]]) == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["code"] == "usage"
        assert what in error["what"]
        assert hint in error["hint"]


def test_no_command_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a word, the commands; but nothing was done, so the exit code is that of a mistake."""
    assert main([]) == 2
    assert "unmount" in capsys.readouterr().out


def test_an_expected_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Object, reason and hint on stderr; nothing on stdout; the class's exit code."""
    assert main(["plan", str(tmp_path), "--scheme", "blok"]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err == (
        'error: unknown scheme "blok". hint: per_tensor, per_channel, block or block_free\n'
    )


def test_an_error_has_one_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store that is no directory: the reason brings its hint, and no second one follows."""
    llama_like(tmp_path / "src")
    (tmp_path / "file").touch()
    assert main(["build", str(tmp_path / "src"), "--store", str(tmp_path / "file")]) == 22
    said = capsys.readouterr().err
    assert "is not a directory" in said
    assert said.count("hint: ") == 1


def test_an_expected_error_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json the same is one document on stdout, too."""
    (tmp_path / "src").mkdir()
    assert main(["plan", str(tmp_path / "src"), "--json"]) == 10
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "source.invalid"
    assert set(error) == {"code", "what", "hint", "facts"}


def test_a_bug_is_a_traceback_and_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is not foreseen shows where it happened; with --json the document says so, too."""

    def broken(request: Request) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(status, "show", broken)
    assert main(["status"]) == 70
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "RuntimeError: unforeseen" in seen.err
    assert main(["status", "--json"]) == 70
    seen = capsys.readouterr()
    assert json.loads(seen.out) == {
        "error": {
            "code": "error",
            "what": "a bug: RuntimeError: unforeseen",
            "hint": "please report the traceback on stderr",
            "facts": {},
        }
    }
    assert seen.err.startswith("Traceback")


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends with the code that shells expect."""

    def interrupted(request: Request) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "show", interrupted)
    assert main(["status"]) == 130


def test_an_early_interrupt_is_130_too() -> None:
    """Ctrl-C while our own modules are still being imported: no traceback either."""
    script = (
        "import sys\nfrom fp8fs.cli import main\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'fp8fs.signals':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_json_after_the_separator_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """``run``'s command keeps its own --json."""
    assert main(["run", "/nonexistent", "--", "true", "--json"]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "{}" in seen.err


@pytest.mark.parametrize(
    ("words", "request_"),
    [
        (["status"], Request()),
        (["status", "/mnt", "--json"], Request("/mnt", as_json=True)),
        (["status", "--json", "-q"], Request(as_json=True, quiet=True)),
        (["status", "--help"], None),
        (["status", "a", "b"], None),
        (["plan", "x"], None),
        ([], None),
    ],
)
def test_quick_status_understands_plain_spellings_only(
    words: list[str], request_: Request | None
) -> None:
    """Everything else, mistakes included, is left to the option parser."""
    assert quick_request(words) == request_


def test_quiet_status_of_no_mounts_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without mounts a note says so, and -q silences it."""
    monkeypatch.setattr("fp8fs.fuse.session.list_mounts", list)
    monkeypatch.setattr("fp8fs.fuse.session.list_elsewhere", list)
    assert main(["status"]) == 0
    assert capsys.readouterr() == ("", "no fp8fs mounts\n")
    assert main(["status", "-q"]) == 0
    assert capsys.readouterr() == ("", "")


def test_status_and_version_import_little() -> None:
    """``status`` starts without the option parser, numpy, numba, FUSE or torch."""
    script = (
        "import sys\nfrom fp8fs.cli import main\nmain(['status', '--quiet'])\n"
        "heavy = {'typer', 'rich', 'numpy', 'numba', 'mfusepy', 'torch'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_plan_as_json_and_as_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both show every tensor; neither makes a store."""
    llama_like(tmp_path / "src")
    assert main(["plan", str(tmp_path / "src"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    names = {row["name"] for row in document["tensors"]}
    assert any(name.endswith("q_proj.weight") for name in names)
    row = next(r for r in document["tensors"] if r["name"].endswith("q_proj.weight"))
    assert (row["dtype_in"], row["dtype_out"]) == ("BF16", "F8_E4M3")
    assert {"plan_id", "components", "files", "shards", "hidden", "warnings", "recipe"} <= set(
        document
    )
    assert main(["plan", str(tmp_path / "src")]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in names)
    assert not (tmp_path / "store").exists()


def test_plan_shows_runtime_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table gives the view's name beside the source's where they differ, and counts FP8 tensors alone."""
    wan_like(tmp_path / "src", layers=1)
    assert main(["plan", str(tmp_path / "src"), "--names", "runtime"]) == 0
    table = capsys.readouterr().out
    assert "blocks.0.attn1.to_k.bias -> blocks.0.attn1.to_qkv.bias" in table
    assert "F32 -> BF16" in table
    assert "transformer: 10 of 31 tensors quantized" in table


def test_path_without_a_store_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing built: no path, exit 1, and no store made by asking."""
    llama_like(tmp_path / "src")
    assert main(["path", str(tmp_path / "src")]) == 1
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "store").exists()


def test_unmounted_places_exit_with_42(tmp_path: Path) -> None:
    """``unmount`` and ``status`` of no mount say so."""
    assert main(["unmount", str(tmp_path)]) == 42
    assert main(["status", str(tmp_path)]) == 42


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (90_868_376, "90.9 MB"),
        (999_600_000, "1 GB"),
        (123_456_789_012, "123 GB"),
        (1_400_000_000_000, "1.4 TB"),
        (5 * 10**18, "5000 PB"),
    ],
)
def test_sizes_have_three_digits(count: int, text: str) -> None:
    """Sizes for people are short and never off by a unit."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.421, "0.42 s"), (12.3, "12 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_times_are_readable(seconds: float, text: str) -> None:
    """Times for people."""
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("text", "size"), [("500G", 500 * 10**9), ("1.5k", 1500), ("7", 7)])
def test_quota_sizes(text: str, size: int) -> None:
    """Decimal units, either case."""
    assert _size(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "-0.5", "12 apples", "nan", "inf", "-inf", "1e400", "1e300T", "infG"]
)
def test_quota_nonsense(text: str) -> None:
    """A quota that is no size is a usage error."""
    with pytest.raises(UsageError):
        _size(text)


def test_status_for_people_names_what_went_wrong() -> None:
    """Errors, changes and the reason for degraded service are all in the text."""
    error = MountPointError("model.safetensors: size was 1, is 2", hint="mount again")
    shown = "\n".join(
        describe(
            {
                "dst": "/mnt",
                "src": "/src",
                "bytes": {"source": 10, "view": 5, "read": 1, "written": 2},
                "shards": {"sealed": 1, "total": 2},
                "units": {"made": 1, "reused": 2, "total": 4},
                "gb_per_s": 1.5,
                "device": "cpu",
                "eta_s": 3,
                "serve": "handoff",
                "grain": "shard",
                "pid": 1,
                "store": "/store",
                "log": "/log",
                "degraded": "the disk is full",
                "source_changes": ["a changed"],
                "warnings": ["careful"],
                "errors": [error.as_dict()],
            }
        )
    )
    for words in ("the disk is full", "a changed", "careful", "size was 1, is 2. hint: mount"):
        assert words in shown


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """``fp8fs plan | head`` ends quietly."""
    llama_like(tmp_path / "src")
    command = f"{sys.executable} -m fp8fs plan {tmp_path / 'src'} | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("command", ["plan SRC", "plan SRC --json", "build SRC", "ls", "ls --json"])
def test_a_stdout_that_takes_nothing(tmp_path: Path, command: str) -> None:
    """Full: one line says so. Closed: the command does its work, and no file of ours becomes its stdout."""
    src = tmp_path / "src"
    llama_like(src)
    words = " ".join([sys.executable, "-m", "fp8fs", command.replace("SRC", str(src))])
    full = subprocess.run(f"{words} > /dev/full", shell=True, capture_output=True, text=True)
    assert full.returncode == 2
    assert full.stderr.startswith("error: stdout cannot be written: No space left on device")
    assert full.stderr.count("\n") == 1
    closed = subprocess.run(f"{words} >&- <&-", shell=True, capture_output=True, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_current_directory_that_is_gone(tmp_path: Path) -> None:
    """Absolute paths work there; what needs a place to start from says that there is none."""
    src, gone = tmp_path / "src", tmp_path / "gone"
    llama_like(src)
    gone.mkdir()
    script = (
        "import os, sys\nfrom fp8fs.cli import main\n"
        f"os.chdir({str(gone)!r})\nos.rmdir({str(gone)!r})\n"
        f"sys.exit(main(['plan', {str(src)!r}]) or main(['unmount', {str(src)!r}]) - 42 "
        "or main(['unmount', 'here']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: the current directory is gone. hint: cd to another one"
    )
    assert "Traceback" not in done.stderr


def test_commands_are_repeatable(capsys: pytest.CaptureFixture[str]) -> None:
    """Looking at a store that is not there yet, twice, works and prints one document each time."""
    looks: list[Callable[[], int]] = [
        lambda: main(["ls", "--json"]),
        lambda: main(["gc", "--json"]),
    ]
    for look in looks * 2:
        assert look() == 0
        json.loads(capsys.readouterr().out)


EMPTY_PATHS = [
    (["plan", ""], "SRC"),
    (["build", ""], "SRC"),
    (["path", ""], "SRC"),
    (["verify", ""], "SRC|STORE|CACHE"),
    (["mount", "", "dst"], "SRC"),
    (["mount", "src", ""], "DST"),
    (["unmount", ""], "DST"),
    (["umount", ""], "DST"),
    (["status", ""], "[DST]"),
    (["run", "", "--", "ls", "{}"], "SRC"),
    (["ls", "--store", ""], "--store"),
    (["gc", "--store="], "--store"),
    (["rm", "abcd", "--store", ""], "--store"),
    (["build", "src", "--store", ""], "--store"),
    (["mount", "src", "dst", "--store="], "--store"),
    (["build", "src", "--to", ""], "--to"),
    (["doctor", "--engine", ""], "--engine"),
    (["doctor", "--engine", "view", "--python", ""], "--python"),
]


@pytest.mark.parametrize(("words", "name"), EMPTY_PATHS)
def test_an_empty_path_is_a_mistake(
    words: list[str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An unset variable never means the current directory: exit 2, by the name of what is empty, and nothing is made."""
    monkeypatch.chdir(tmp_path)
    llama_like(tmp_path / "src")
    assert main(words) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert f"invalid value for '{name}'" in seen.err
    assert "the path is empty" in seen.err
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_an_empty_store_variable_means_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``FP8FS_STORE=`` is as good as none: the store is in the user's cache directory."""
    monkeypatch.setenv("FP8FS_STORE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["store"] == str(tmp_path / "cache" / "fp8fs")
