"""Records the system calls of this process and of what it starts, by attaching strace to it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CALLS = "trace=%file,%desc,madvise,munmap"
PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)


@contextmanager
def recorded(output: Path) -> Iterator[None]:
    """The calls of the block are in *output* when it is left, with the paths of file descriptors.

    Raises: RuntimeError with what strace said if it cannot attach.
    """
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY, 0, 0, 0)  # where only parents may trace
    command = ["strace", "-f", "-y", "-s", "4096", "-e", CALLS, "-e", "signal=none", "-o"]
    with subprocess.Popen(
        [*command, output, "-p", str(os.getpid())], stderr=subprocess.PIPE
    ) as tracer:
        assert tracer.stderr is not None
        said = tracer.stderr.readline()
        if b"attached" not in said:
            raise RuntimeError(f"strace: {said.decode()}")
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGINT)  # it detaches, and writes what it has
