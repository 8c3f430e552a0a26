"""The process that serves one mount: FUSE in a thread, signals and the mount's life in the main thread.

Why not FUSE in the main thread: a Python signal handler runs in the main thread only, and inside libfuse's loop that
thread never returns to the interpreter. So the main thread keeps to itself: it waits on one pipe that tells it of
signals (``signal.set_wakeup_fd`` writes there from whichever thread the kernel picked), of the mount's first answer and of its end.

The end of a mount, whoever asks for it (SIGTERM, SIGINT, SIGHUP, ``umount``): the mount and the binds below it are
detached in one step, the engine stops, waiting readers get an error, libfuse's loop ends, the process exits 0. Whatever
does not end by itself within the time limit ends with the process: the kernel then aborts the connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from fp8fs.errors import MountError
from fp8fs.fuse.adapter import Operations, fuse_options
from fp8fs.fuse.libfuse import LibFuse, in_user_namespace, load_libfuse
from fp8fs.fuse.mountinfo import find, read_mountinfo
from fp8fs.fuse.outside import attach_command, detach_command, run
from fp8fs.fuse.polling import readable
from fp8fs.fuse.spec import Mounted, MountSpec
from fp8fs.fuse.state import process_start, remove_state, write_state
from fp8fs.view import View

__all__ = ["Factory", "Served", "serve"]

log = logging.getLogger(__name__)

STOP_S = 5.0
"""Longest time from a signal to the end of the process."""

_LET_GO_S = 1.0
"""What waiting readers get to take their error; whoever still holds the mount then (another namespace) never lets go."""

_DETACH_S = 2.0
READ_AHEAD_KB = 1024
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_INIT, _END = 254, 255  # beside the signal numbers that share the pipe


@dataclass(frozen=True, slots=True)
class Served:
    """What a factory makes. ``facts``: a Mounted to be completed with the mount's own. ``tree``, ``bind_src``: directories
    to bind, "" for none. ``close(timeout_s)`` stops all work; what waits for it gets an error."""

    view: View
    facts: Mounted
    tree: str
    bind_src: str
    close: Callable[[float], None]


class Factory(Protocol):
    def __call__(self, spec: MountSpec, *, bound: bool) -> Served: ...


@dataclass(slots=True)
class _Events:
    """One pipe for everything that the main thread waits for."""

    reader: int = -1
    writer: int = -1
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def tell(self, event: int) -> None:
        os.write(self.writer, bytes([event]))

    def wait(self, wanted: set[int], *, timeout_s: float | None = None, also: int = -1) -> bool:
        """True once one of *wanted* was told; False after the time, or when descriptor *also* is readable."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.seen & wanted:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = readable([self.reader, *([also] if also >= 0 else [])], left)
            if self.reader in ready:
                self.seen.update(os.read(self.reader, 512))
            elif ready or left == 0.0:
                return bool(self.seen & wanted)
        return True


def serve(
    served: Served,
    spec: MountSpec,
    *,
    bound: bool,
    ready: Callable[[Mounted], None],
    lifeline: int = -1,
) -> int:
    """Mount, call *ready* once DST answers and the binds are in place, serve until the mount ends (or *lifeline* becomes
    readable). Returns the exit code.

    Call it in the main thread. Raises: MountError, FuseMissingError before *ready*; nothing is mounted then.
    """
    libfuse = load_libfuse()
    events = _Events()
    for number in _STOPPING:
        signal.signal(number, lambda _number, _frame: None)
    signal.set_wakeup_fd(events.writer, warn_on_full_buffer=False)
    fuse = threading.Thread(
        target=_run_fuse, args=(served.view, spec, libfuse, events), name="fuse", daemon=True
    )
    fuse.start()
    stops = {int(number) for number in _STOPPING} | {_END}
    try:
        events.wait({_INIT, *stops})
        if _INIT not in events.seen or events.seen & stops:
            raise MountError(f"libfuse could not mount {spec.dst}", hint=_mount_hint(spec))
        mounted = _attach(served, spec, events, bound=bound)
    except BaseException:
        _stop(served, spec, fuse)
        raise
    log.info("serving %s from %s (pid %d)", spec.dst, spec.src, os.getpid())
    ready(mounted)
    events.wait(stops, also=lifeline)
    if _END not in events.seen:
        names = [number.name for number in _STOPPING if number in events.seen]
        log.info("%s: unmounting %s", ", ".join(names) or "whoever mounted is gone", spec.dst)
    for (
        number
    ) in _STOPPING:  # whoever unmounted sends one to hurry us: it must not change the exit code
        signal.signal(number, signal.SIG_IGN)
    _stop(served, spec, fuse)
    _forget(spec)
    if fuse.is_alive():
        log.info("some readers did not let go; ending them with the connection")
        logging.shutdown()
        os._exit(0)
    return 0


def _run_fuse(view: View, spec: MountSpec, libfuse: LibFuse, events: _Events) -> None:
    operations = Operations(view, libfuse, on_init=lambda: events.tell(_INIT))
    options = fuse_options(fsname=spec.src, minor=libfuse.minor, allow_other=spec.allow_other)
    try:
        libfuse.binding.FUSE(operations, spec.dst, raw_fi=True, foreground=True, **options)
    except RuntimeError as err:
        log.error("libfuse ended with %s", err)
    finally:
        events.tell(_END)


def _attach(served: Served, spec: MountSpec, events: _Events, *, bound: bool) -> Mounted:
    """Ask the mount for an answer, from outside; bind; note down."""
    tree, source = (served.tree, served.bind_src) if bound else ("", "")
    child = subprocess.Popen(
        attach_command(spec.dst, tree, source), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    pidfd = os.pidfd_open(child.pid)
    try:
        while child.poll() is None:
            if events.wait({int(n) for n in _STOPPING} | {_END}, also=pidfd):
                child.kill()
                raise MountError(f"stopped before {spec.dst} was ready", hint=_log_hint(spec))
        answer = child.stderr.read().decode("utf-8", "replace").strip() if child.stderr else ""
    finally:
        os.close(pidfd)
        child.wait()
        if child.stderr:
            child.stderr.close()
    if child.returncode:
        raise MountError(
            f"{spec.dst}: the mount could not be completed: {answer or child.returncode}",
            hint="--serve inline needs no binds" if bound else _log_hint(spec),
        )
    if spec.grain == "shard" and os.geteuid() == 0:
        _raise_read_ahead(spec.dst)
    mounted = msgspec.structs.replace(
        served.facts,
        live=True,
        pid=os.getpid(),
        pid_start=process_start(os.getpid()),
        uid=os.geteuid(),
        bind_src=source,
    )
    try:
        write_state(mounted)
    except MountError as err:
        log.warning("%s", err)
    return mounted


def _raise_read_ahead(dst: str) -> None:
    """Ask the kernel for requests of 1 MiB. With grain tensor never: a fault would make its neighbours."""
    mount = find(dst, read_mountinfo())
    if mount is None:
        return
    try:
        with open(f"/sys/class/bdi/{mount.device}/read_ahead_kb", "w", encoding="ascii") as file:
            file.write(str(READ_AHEAD_KB))
    except OSError as err:
        log.info("read-ahead stays at the kernel's default: %s", err.strerror)


def _stop(served: Served, spec: MountSpec, fuse: threading.Thread) -> None:
    """The mount is detached with its binds, the engine has stopped; FUSE has ended, if its readers let it."""
    end = time.monotonic() + STOP_S - 1.0
    if find(spec.dst, read_mountinfo()) is not None and fuse.is_alive():
        answer = run(detach_command(spec.dst), _DETACH_S)
        if answer is None or answer.code:
            log.warning("unmounting: %s", "no answer" if answer is None else answer.said)
    served.close(max(0.5, end - time.monotonic() - _LET_GO_S))
    fuse.join(_LET_GO_S)


def _forget(spec: MountSpec) -> None:
    remove_state(spec.dst, os.geteuid(), pid=os.getpid())
    if spec.created_dst and find(spec.dst, read_mountinfo()) is None:
        with contextlib.suppress(OSError):
            os.rmdir(spec.dst)


def _mount_hint(spec: MountSpec) -> str:
    if not in_user_namespace():
        return _log_hint(spec)
    return f"a user namespace mounts only in a mount namespace of its own (unshare --mount); {_log_hint(spec)}; or fp8fs build"


def _log_hint(spec: MountSpec) -> str:
    return f"see {spec.log_path}" if spec.log_path else "see the messages above"
