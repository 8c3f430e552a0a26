"""SRC, read-only: what is there, the bytes of it, and whether it is still what it was."""

from fp8fs.source.opened import Source, hints_key

__all__ = ["Source", "hints_key"]
