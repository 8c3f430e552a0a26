"""Where a run happens: folders, interpreters, sizes, and fp8fs as a user would call it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from measure import Run, files_below, run, settle, warm

__all__ = ["INSIDE", "Mount", "World"]

INSIDE = Path(__file__).resolve().parent / "inside"
"""Scripts that other interpreters run."""


@dataclass(frozen=True)
class Mount:
    """A live mount and the pid of its daemon."""

    path: Path
    pid: int

    @property
    def shards(self) -> list[Path]:
        """The view's weight files, by name: nothing is opened."""
        return sorted(
            self.path / name for name in os.listdir(self.path) if name.endswith(".safetensors")
        )


@dataclass
class World:
    """One run's folders and settings. Everything below ``scratch`` goes away at the end."""

    clone: Path
    scratch: Path
    subject: Path
    peers: Path | None
    size_bytes: int
    repetitions: int
    quick: bool
    root: bool
    kernel_cache: Path = field(init=False)
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.kernel_cache = self.scratch / "cache" / "fp8fs" / "kernels"
        self.env = {
            **os.environ,
            "XDG_CACHE_HOME": str(self.scratch / "cache"),
            "XDG_STATE_HOME": str(self.scratch / "state"),
            "HF_HUB_OFFLINE": "1",
        }
        self.env.pop("FP8FS_STORE", None)

    # -- folders ------------------------------------------------------------------------------

    @property
    def store(self) -> Path:
        """The one store that figures fill and remove."""
        return self.scratch / "store"

    def remove(self, *paths: Path) -> None:
        """These are gone, and the disk has nothing left to do for them."""
        for path in paths:
            if path.is_file():
                path.unlink()
            shutil.rmtree(path, ignore_errors=True)
        settle()

    def free(self, name: str) -> Path:
        """A path of that name with nothing there."""
        path = self.scratch / name
        self.remove(path)
        return path

    # -- fp8fs --------------------------------------------------------------------------------

    def fp8fs(self, *words: str | Path) -> list[str | Path]:
        """The command line of the ``fp8fs`` command."""
        return [self.subject.parent / "fp8fs", *words]

    def build(self, src: Path, *options: str) -> Run:
        """``fp8fs build`` into the store, with all its syncs."""
        return run(self.fp8fs("build", src, "--store", self.store, "--quiet", *options), self.env)

    def cold_build(self, src: Path, *options: str) -> float:
        """Seconds of a build into an empty store, source in the page cache, nothing left to write back."""
        self.remove(self.store)
        warm(files_below(src))
        settle()
        return self.build(src, *options).wall_s

    def compile_kernels(self) -> None:
        """The machine code of every scheme's kernels is cached, as it is after the first use ever."""
        tiny = self.llama(4 << 20, shards=1)
        for scheme in ("per_tensor", "per_channel", "block"):
            self.build(tiny, "--scheme", scheme)
        self.remove(self.store)

    @contextlib.contextmanager
    def mounted(self, src: Path, *options: str, store: Path | None = None) -> Iterator[Mount]:
        """``fp8fs mount``; unmounted at the end, whatever happens."""
        path = self.scratch / "mnt"
        place = store or self.store
        words = self.fp8fs("mount", src, path, "--store", place, "--json", *options)
        try:
            answer = json.loads(run(words, self.env).stdout)
            yield Mount(path, int(answer["pid"]))
        finally:
            self.unmount(path)

    def unmount(self, path: Path) -> None:
        """Nothing is mounted at *path*, and its daemon is gone."""
        subprocess.run(
            [str(word) for word in self.fp8fs("unmount", path)],
            env=self.env,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with contextlib.suppress(OSError):
            path.rmdir()

    def until_mounted(self, command: list[str | Path], path: Path) -> float:
        """Seconds from starting *command* to *path* answering ``stat`` as another filesystem, seen from outside."""
        path.mkdir(exist_ok=True)
        before = path.stat().st_dev
        started = time.perf_counter()
        process = subprocess.Popen(
            [str(word) for word in command],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        elapsed_s = float("nan")
        while process.poll() is None:
            if os.stat(path).st_dev != before:
                elapsed_s = time.perf_counter() - started
                break
            time.sleep(0.001)
        if process.wait():
            raise RuntimeError(f"mount failed with {process.returncode}")
        return elapsed_s

    # -- other interpreters -------------------------------------------------------------------

    def inside(self, python: Path, script: str, *words: str | Path) -> dict[str, float]:
        """What one of our scripts prints as JSON, run by another interpreter."""
        done = run([python, INSIDE / script, *words], self.env)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    @contextlib.contextmanager
    def ready(
        self, python: Path, script: str, *words: str | Path
    ) -> Iterator[Callable[[str], str]]:
        """A script that has started and imported everything; the callable sends a line and waits for the answer."""
        process = subprocess.Popen(
            [str(python), str(INSIDE / script), *map(str, words)],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        answers = process.stdout
        asks = process.stdin
        try:
            if answers.readline().strip() != "ready":
                raise RuntimeError(f"{script} did not start")

            def go(word: str = "go") -> str:
                asks.write(f"{word}\n")
                asks.flush()
                answer = answers.readline()
                if not answer:
                    raise RuntimeError(f"{script} ended with {process.wait()}")
                return answer

            yield go
        finally:
            asks.close()
            answers.close()
            process.wait()

    # -- checkpoints --------------------------------------------------------------------------

    def llama(self, size_bytes: int, shards: int = 4, **shape: int) -> Path:
        """A Llama-shaped BF16 checkpoint, seeded; made once per run."""
        options = [f"--{name}={value}" for name, value in sorted(shape.items())]
        name = "-".join(["llama", str(size_bytes), str(shards), *options]).replace("=", "")
        path = self.scratch / "src" / name
        if not path.exists():
            maker = self.clone / "scripts" / "make_checkpoint.py"
            words = [path, "--kind", "llama", "--size", str(size_bytes), "--shards", str(shards)]
            run([self.subject, maker, *words, *options], self.env)
            settle()
        return path

    @property
    def main(self) -> Path:
        """The checkpoint that most figures use."""
        return self.llama(self.size_bytes)

    def say(self, text: str) -> None:
        """Progress, on stderr."""
        print(text, file=sys.stderr, flush=True)
