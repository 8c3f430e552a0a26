"""The Python API: what the commands do, for programs.

with fp8fs.mounted("Wan2.2-T2V-A14B") as path: ...
tree = fp8fs.build("Wan2.2-T2V-A14B", to="/models/wan-fp8")
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from fp8fs.core.recipe import Recipe
from fp8fs.core.scale_range import OddScale
from fp8fs.engine import EngineStats
from fp8fs.errors import NotMountedError, UsageError
from fp8fs.signals import Ended, handling, ignore, undisturbed, unwinding

__all__ = ["build", "check_command", "mounted", "run_command"]

StrPath = str | os.PathLike[str]

_COMMAND_END_S = 10.0
"""What a command gets to end by itself once we were told to."""


def _recipe(
    recipe: Recipe | None,
    *,
    scheme: str,
    names: str,
    components: Sequence[str],
    keep: Sequence[str],
    quantize: Sequence[str],
    split_experts: bool,
) -> Recipe:
    from fp8fs.assembly import recipe_from

    if recipe is not None:
        return recipe
    return recipe_from(
        scheme=scheme,
        names=names,
        components=tuple(components),
        keep=tuple(keep),
        quantize=tuple(quantize),
        split_experts=split_experts,
    )


def _store(store: StrPath | None) -> Path:
    from fp8fs.assembly import default_store_root

    chosen = store if store is not None else os.environ.get("FP8FS_STORE") or None
    return Path(chosen).expanduser().absolute() if chosen is not None else default_store_root()


@contextmanager
def mounted(
    src: StrPath,
    dst: StrPath | None = None,
    *,
    store: StrPath | None = None,
    scheme: str = "",
    names: str = "checkpoint",
    components: Sequence[str] = (),
    keep: Sequence[str] = (),
    quantize: Sequence[str] = (),
    split_experts: bool = False,
    recipe: Recipe | None = None,
    serve: str = "handoff",
    grain: str = "shard",
    device: str = "auto",
    workers: int = 0,
    allow_other: bool = False,
    allow_unquantized: bool = False,
) -> Iterator[Path]:
    """Mount *src* and yield the mount's path; unmounted on every way out, signals included, SIGKILL too.

    *dst* None: a temporary directory. The options are those of ``fp8fs mount``; *recipe* replaces the
    recipe options. Raises: Fp8fsError.
    """
    from fp8fs.fuse import session

    made = None if dst is not None else tempfile.mkdtemp(prefix="fp8fs-")
    point = Path(dst if dst is not None else f"{made}/{Path(src).absolute().name or 'view'}")
    spec = session.MountSpec(
        src=os.fspath(Path(src).expanduser().absolute()),
        dst=os.fspath(point.expanduser().absolute()),
        store=os.fspath(_store(store)),
        recipe=_recipe(
            recipe,
            scheme=scheme,
            names=names,
            components=components,
            keep=keep,
            quantize=quantize,
            split_experts=split_experts,
        ),
        serve=serve,
        grain=grain,
        device=device,
        workers=workers,
        allow_other=allow_other,
        allow_unquantized=allow_unquantized,
    )
    # Its other end is the server's: if this process ends in whatever way, the server sees it and unmounts.
    lifeline, ours = os.pipe2(os.O_CLOEXEC)
    try:
        with unwinding():
            found = session.mount(spec, lifeline=lifeline)
            try:
                yield Path(found.dst)
            finally:
                with undisturbed(), suppress(NotMountedError):  # somebody was quicker
                    session.unmount(found.dst, lazy=True)
    finally:
        os.close(ours)
        os.close(lifeline)
        if made is not None:
            with suppress(OSError):
                os.rmdir(point)
            with suppress(OSError):
                os.rmdir(made)


def build(
    src: StrPath,
    to: StrPath | None = None,
    *,
    store: StrPath | None = None,
    scheme: str = "",
    names: str = "checkpoint",
    components: Sequence[str] = (),
    keep: Sequence[str] = (),
    quantize: Sequence[str] = (),
    split_experts: bool = False,
    recipe: Recipe | None = None,
    device: str = "auto",
    workers: int = 0,
    progress: Callable[[EngineStats], None] | None = None,
    note: Callable[[str], None] | None = None,
    report: Callable[[list[OddScale]], None] | None = None,
) -> Path:
    """Quantize all of *src* into the store, without FUSE. Returns the path of the finished tree.

    *to*: also copy it there, plain and self-contained, and return that path. The copy is checked against the digests of
    what was made; what is damaged in the store is made again. Resumable: what an earlier run made is not made again.
    *progress* gets the engine's statistics a few times a second; *note* a sentence for each weight that is kept because
    it holds NaN or Inf, and for what was damaged; *report*, once, the weights under scales that vLLM does not load
    unchanged. Raises: Fp8fsError.
    """
    from fp8fs.building import build_tree
    from fp8fs.export import check_apart, check_target

    source = Path(src).expanduser()
    target = Path(to).expanduser() if to is not None else None
    root = _store(store)
    if target is not None:
        check_target(target, source)
        check_apart(target, root)
    chosen = _recipe(
        recipe,
        scheme=scheme,
        names=names,
        components=components,
        keep=keep,
        quantize=quantize,
        split_experts=split_experts,
    )
    make = partial(
        build_tree,
        source,
        chosen,
        root,
        device=device,
        workers=workers,
        progress=progress,
        note=note,
    )
    tree = make(report=report)
    if target is None:
        return tree
    from fp8fs.copies import copy_tree  # nothing on the way to the first byte needs it

    copy_tree(source, target, chosen, root, make, note)
    return target.absolute()


def check_command(program: str) -> None:
    """Raises: UsageError if there is no such command."""
    if shutil.which(program) is None:
        raise UsageError(f'no command "{program}"', hint="is it installed, and on PATH?")


def run_command(command: Sequence[str], *, stdout: int | None = None) -> int:
    """Run *command* to its end and return its exit code (128 + N if signal N ended it).

    *stdout*: a descriptor for what it prints. Ctrl-C reaches the command by the terminal itself; we wait for its end.
    Raises: UsageError if it cannot be started.
    """
    check_command(command[0])
    child: subprocess.Popen[bytes] | None = None
    told: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if child is not None:  # raised while the command is being started, it would leave it behind
            raise Ended(number)

    # No exception at Ctrl-C: inside of wait, it could lose the command's exit code.
    with handling({signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGINT: ignore}):
        try:
            child = _start(command, stdout)
            if told:
                raise Ended(told[0])
            code = child.wait()
        except BaseException:
            with undisturbed():
                if child is not None:
                    _end_command(child)
            raise
    return code if code >= 0 else 128 - code


def _start(command: Sequence[str], stdout: int | None) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(list(command), stdout=stdout)
    except OSError as err:
        raise UsageError(
            f'"{command[0]}" cannot be run: {err.strerror}', hint="a script needs its #! line"
        ) from err


def _end_command(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(_COMMAND_END_S)
    child.kill()
    child.wait()
