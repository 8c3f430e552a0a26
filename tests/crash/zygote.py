"""``python -m tests.crash.zygote BASE``: forks a child for each line "FLOW ROOT NTH" and prints its pid, then its end.

Everything is imported once, so that hundreds of processes can be killed in a minute. With NTH > 0 the child kills itself
with SIGKILL at its n-th system call on the store: before it, or (NTH odd) right behind it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8fs.store.fsio import FsIo
from tests.crash.faults import COUNTED
from tests.crash.flows import FLOWS, World, injected


class LethalIo(FsIo):
    """The *nth* counted call is the last thing that this process does."""

    def __init__(self, nth: int) -> None:
        self.calls = 0
        self.nth = nth
        self.lock = threading.Lock()

    def step(self, *, behind: bool) -> None:
        with self.lock:
            self.calls += not behind
            if self.calls == self.nth and behind == bool(self.nth % 2):
                os.kill(os.getpid(), signal.SIGKILL)


def _lethal(name: str) -> Callable[..., Any]:
    real = getattr(FsIo, name)

    def call(self: LethalIo, *args: Any, **kwargs: Any) -> Any:
        self.step(behind=False)
        result = real(self, *args, **kwargs)
        self.step(behind=True)
        return result

    return call


for _name in COUNTED:
    setattr(LethalIo, _name, _lethal(_name))


def main(base: Path) -> None:
    world = World.existing(base)
    print("ready", flush=True)
    for line in sys.stdin:
        flow, root, nth = line.split()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with injected(LethalIo(int(nth))):
                    FLOWS[flow][0](world, Path(root))
                code = 0
            finally:
                os._exit(code)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
