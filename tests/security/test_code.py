"""What the package never does, read in its own source."""

from __future__ import annotations

import ast
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fp8fs"
MODULES = sorted(PACKAGE.rglob("*.py"))

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "yaml", "joblib", "pty", "code"}  # fmt: skip
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "input"),
    *("os.system", "os.popen", "os.execv", "os.execve", "os.execvp", "os.spawnv", "os.fork"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp"),
    *("torch.load", "numpy.load", "np.load", "pickle.loads", "pickle.load"),
}
LOADS_BY_NAME = {
    # The factory of a mount's spec, which its own launcher writes; tests put a fake engine there.
    "fuse/daemon.py": {"importlib.import_module"},
}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the dotted name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_there_is_something_to_read() -> None:
    """The tests below read the whole package."""
    assert len(MODULES) > 80


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_shell_no_eval_no_pickle(path: Path) -> None:
    """No module runs a shell, evaluates text, unpickles, or loads code by a name that comes from outside."""
    tree = ast.parse(path.read_text())
    allowed = LOADS_BY_NAME.get(str(path.relative_to(PACKAGE)), set())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] not in FORBIDDEN_IMPORTS, f"line {node.lineno}: {name}"
    for name, call in calls(tree):
        where = f"line {call.lineno}: {name}"
        assert name not in FORBIDDEN_CALLS, where
        if name in ("importlib.import_module", "import_module"):
            constant = isinstance(call.args[0], ast.Constant)
            assert constant or "importlib.import_module" in allowed, where
        for keyword in call.keywords:
            if keyword.arg in ("shell", "allow_pickle"):
                value = keyword.value
                assert isinstance(value, ast.Constant), where
                assert value.value is False, where


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_commands_are_lists(path: Path) -> None:
    """Programs are started from argument lists, never from one string that something would split."""
    for name, call in calls(ast.parse(path.read_text())):
        if name in ("subprocess.run", "subprocess.Popen", "subprocess.check_output", "Popen"):
            assert call.args, f"line {call.lineno}"
            assert not isinstance(call.args[0], ast.JoinedStr | ast.Constant), f"line {call.lineno}"


def test_source_never_writes() -> None:
    """The rooms that touch SRC hold no call that changes a file, and open nothing for writing."""
    changing = {
        *(
            "write",
            "pwrite",
            "pwritev",
            "truncate",
            "ftruncate",
            "unlink",
            "remove",
            "rename",
            "replace",
        ),
        *(
            "mkdir",
            "makedirs",
            "rmdir",
            "chmod",
            "fchmod",
            "chown",
            "fchown",
            "lchown",
            "utime",
            "link",
        ),
        *(
            "symlink",
            "mknod",
            "mkfifo",
            "setxattr",
            "removexattr",
            "posix_fallocate",
            "copy_file_range",
        ),
    }
    for path in (PACKAGE / "source").glob("*.py"):
        for name, call in calls(ast.parse(path.read_text())):
            if name.startswith("os."):
                assert name.removeprefix("os.") not in changing, f"{path.name}:{call.lineno}"
            assert not name.endswith((".write_bytes", ".write_text", ".touch")), path.name
        text = path.read_text()
        assert not any(flag in text for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC")), path


def test_nothing_set_uid_is_shipped() -> None:
    """No file of the package or of the scripts asks for another user's rights."""
    for folder in (PACKAGE, PACKAGE.parent / "scripts"):
        for path in folder.rglob("*"):
            assert not path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWOTH) or (
                path.is_symlink()
            ), path
