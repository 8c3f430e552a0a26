"""SRC, read-only: what is there, the bytes of it, and whether it is still what it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from typing_extensions import Buffer, Self

from fp8fs.core.checkpoint import Checkpoint
from fp8fs.core.fingerprint import Fingerprint, Hint

__all__ = ["Source", "hints_key"]


def hints_key(path: Path) -> str:
    """The store's key for the hints of the SRC at *path*: local to this machine."""
    raise NotImplementedError


class Source:
    """An opened SRC. Thread-safe; nothing below SRC is ever written.

    ``root``: the directory that the view mirrors, absolute, symlinks resolved (in an HF cache: the snapshot).
    ``bind_root``: the directory to bind for large files, so that the symlinks in them resolve (HF cache: the
    repository folder, else ``root``); ``bind_prefix``: ``root`` below it ("snapshots/<rev>", else "").
    ``checkpoint``: everything the planner needs. ``fingerprints``: by shard path.
    """

    root: Path
    bind_root: Path
    bind_prefix: str
    checkpoint: Checkpoint
    fingerprints: dict[str, Fingerprint]

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        hints: Mapping[str, Hint] | None = None,
        adopted: Mapping[str, str] | None = None,
        max_open_files: int = 64,
    ) -> Self:
        """Scan, read headers and JSONs, check, fingerprint.

        *hints*: what ``hints()`` gave at the last mount. *adopted*: identity -> the older identity proved equal.
        Raises: SourceInvalidError, one sentence.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def hints(self) -> dict[str, Hint]:
        """Local facts to keep for the next mount, by shard path (core.fingerprint.encode_hints)."""
        raise NotImplementedError

    def pread_into(self, shard_path: str, buffer: Buffer, file_offset: int) -> None:
        """Fill all of *buffer* from the shard. Raises: SourceChangedError if the file ends early or is not the planned one."""
        raise NotImplementedError

    def check(self, path: str) -> None:
        """Compare the file with the facts of plan time: fstat of the open file and stat of the path.

        Raises: SourceChangedError naming the file and the difference.
        """
        raise NotImplementedError

    def open_file(self, path: str) -> int:
        """A new read-only descriptor of any regular file of SRC, checked against plan time. The caller closes it."""
        raise NotImplementedError

    def drop(self, shard_path: str, file_offset: int, length: int) -> None:
        """Give the page cache back what was consumed (whole pages inside the range). Never fails."""
        raise NotImplementedError

    def changes(self) -> list[str]:
        """One sentence for each planned file that is not what it was: stats only."""
        raise NotImplementedError

    def close(self) -> None:
        """Close every descriptor. Repeatable; reads under way finish first or fail."""
        raise NotImplementedError
