"""What is said where FUSE is missing or limited."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8fs.errors import FuseMissingError, MountError
from fp8fs.fuse import libfuse


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names what was tried, what it answered, and the one command to run."""
    monkeypatch.setenv("FUSE_LIBRARY_PATH", "/none/libfuse3.so")
    with pytest.raises(FuseMissingError) as caught:
        libfuse.find_libfuse()
    assert "/none/libfuse3.so" in caught.value.what
    assert caught.value.hint == "apt-get install fuse3"


def test_a_library_that_is_no_libfuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else under that name is refused too."""
    monkeypatch.setenv("FUSE_LIBRARY_PATH", "libc.so.6")
    with pytest.raises(FuseMissingError, match=r"libc\.so\.6"):
        libfuse.find_libfuse()


def test_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A missing device is told apart from one that is not ours to open."""
    monkeypatch.setattr(libfuse, "DEVICE", str(tmp_path / "fuse"))
    with pytest.raises(FuseMissingError, match="does not exist"):
        libfuse.check_fuse(allow_other=False)
    (tmp_path / "fuse").mkdir()
    with pytest.raises(FuseMissingError, match="cannot be opened"):
        libfuse.check_fuse(allow_other=False)


@pytest.mark.parametrize(("seconds", "refused"), [("0", False), ("60", True), ("3599", True), ("7200", False), ("x", False)])  # fmt: skip
def test_request_timeouts(tmp_path: Path, seconds: str, refused: bool) -> None:
    """A limit on requests that is shorter than a fill is refused, with the command that lifts it; no limit is fine."""
    libfuse.check_request_timeouts(tmp_path)
    (tmp_path / "max_request_timeout").write_text(seconds + "\n")
    if not refused:
        libfuse.check_request_timeouts(tmp_path)
        return
    with pytest.raises(MountError) as caught:
        libfuse.check_request_timeouts(tmp_path)
    assert caught.value.hint == "sysctl fs.fuse.max_request_timeout=0"
