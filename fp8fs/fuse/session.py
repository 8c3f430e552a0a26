"""Mount, find and unmount: the launcher's side. Imports neither libfuse nor kernels, so that it starts fast.

A mount is two processes. The *launcher* (this module, in the CLI's process) checks DST, starts the *server*
(``fp8fs.fuse.daemon``) by re-exec, waits for its one line on the readiness pipe, and goes. The server runs FUSE and
never touches DST itself: it could wait on itself. What has to look through the mount (is it answering, bind, unbind)
is done by a third, short-lived process (``fp8fs.fuse.binds``).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

import msgspec
from platformdirs import user_state_path

from fp8fs.core.text import shell_word
from fp8fs.errors import Fp8fsError, MountError, MountPointError, NotMountedError
from fp8fs.fuse.checks import check_choices, check_places, ensure_directory
from fp8fs.fuse.libfuse import check_fuse
from fp8fs.fuse.mountinfo import FSTYPE, find, read_mountinfo, resolve
from fp8fs.fuse.outside import read_command, run
from fp8fs.fuse.polling import readable
from fp8fs.fuse.spec import Mounted, MountSpec, UnmountReport, encode, error_from
from fp8fs.fuse.unmount import clean_up_stale, find_mount, list_elsewhere, list_mounts, unmount
from fp8fs.signals import Ended, handling, undisturbed

__all__ = [
    "MountSpec",
    "Mounted",
    "UnmountReport",
    "default_log_path",
    "find_mount",
    "list_elsewhere",
    "list_mounts",
    "mount",
    "mount_foreground",
    "read_status",
    "unmount",
]

_LOG_MAX_BYTES = 10 << 20
_STATUS_MAX_BYTES = 16 << 20
_STATUS_S = 10.0
_TICK_S = 0.25
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def mount(spec: MountSpec, *, timeout_s: float = 3600.0, lifeline: int = -1) -> Mounted:
    """DST answers, binds are in place, the server runs in the background with its log in ``log_path``.

    *lifeline*: the reading end of a pipe. The server unmounts and ends once nobody holds the writing end any more.

    Raises: MountPointError, UsageError, FuseMissingError; and whatever Fp8fsError the server meets before it is ready
    (same class, exit code, hint and facts as in the server). Nothing stays mounted then.
    """
    with _prepared(spec) as prepared:
        path = prepared.log_path or str(default_log_path(prepared.dst))
        prepared = msgspec.structs.replace(prepared, log_path=path)
        with _open_log(path) as log_file:
            server, answers = _start(prepared, log_file, lifeline)
        try:
            return _await_answer(server, answers, prepared, timeout_s)
        except BaseException:
            with undisturbed():
                _end(server)
            raise
        finally:
            os.close(answers)
            server.returncode = server.poll() or 0  # it lives on; Popen must not complain of that


def mount_foreground(
    spec: MountSpec,
    *,
    on_ready: Callable[[Mounted], None],
    on_tick: Callable[[Mounted], None] | None = None,
    on_log: Callable[[str], None] | None = None,
) -> int:
    """Like ``mount``, then stays until the mount ends. Returns the server's exit code.

    SIGTERM, SIGINT and SIGHUP are passed on to the server; if this process dies, it gets SIGTERM. One that comes before
    the mount is ready raises Ended, and nothing is mounted. *on_tick* is called about four times a second (progress:
    ``read_status``); *on_log* with each line of the server's log (default: stderr).
    """
    say = on_log or (lambda line: print(line, file=sys.stderr))
    with _prepared(msgspec.structs.replace(spec, foreground=True, log_path="")) as prepared:
        server, answers = _start(prepared, subprocess.PIPE)
        lines = _Lines(server.stderr)
        mounted: Mounted | None = None
        told: list[int] = []

        def pass_on(number: int, _frame: FrameType | None) -> None:
            told.append(number)
            if mounted is not None and server.poll() is None:
                server.send_signal(number)

        try:
            with handling(dict.fromkeys(_FORWARDED, pass_on)):
                while True:
                    wanted = [] if lines.ended else [lines.fd]
                    wanted += [] if mounted else [answers]
                    ready = readable(wanted, _TICK_S)
                    if lines.fd in ready:
                        for line in lines.take():
                            say(line)
                    if told and mounted is None:
                        raise Ended(told[0])
                    if answers in ready and mounted is None:
                        mounted = _await_answer(server, answers, prepared, _TICK_S)
                        on_ready(mounted)
                    if lines.ended and server.poll() is not None:
                        return server.returncode
                    if mounted and on_tick and not ready:
                        on_tick(mounted)
        except BaseException:
            with undisturbed():
                _end(server)
            raise
        finally:
            os.close(answers)
            lines.close()


def read_status(dst: str) -> dict[str, Any]:
    """``DST/.fp8fs/status.json`` of a live mount, parsed.

    Fields: docs/CLI.md (schema, src, dst, store, tree, plan_id, pid, started_ns, log, serve, grain, device, schemes,
    shards{total,sealed}, units{total,made,reused,in_flight}, bytes{source,view,read,written,reused}, waiting, gb_per_s,
    eta_s, errors[], degraded, source_changes[], warnings[]).
    Raises: NotMountedError, also for a mount whose server is dead; MountError if it does not answer in time: whoever
    may mount can call a mount ours and never answer, and root asks too.
    """
    mounted = find_mount(dst)
    if not mounted.live:
        raise NotMountedError(
            f"the server of {mounted.dst} is dead",
            hint=f"fp8fs unmount {shell_word(mounted.dst)}",
        )
    answer = run(read_command(f"{mounted.dst}/.fp8fs/status.json", _STATUS_MAX_BYTES), _STATUS_S)
    if answer is None:
        raise MountError(f"{mounted.dst} gives no status: no answer in {_STATUS_S:.0f} s")
    try:
        if answer.code:
            raise ValueError(answer.said)
        status = json.loads(answer.out)
        if not isinstance(status, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as err:
        raise MountError(f"{mounted.dst} gives no status: {err}") from err
    return status


def default_log_path(dst: str) -> Path:
    """One log per mount point, in the user's state directory."""
    digest = hashlib.sha256(os.fsencode(dst)).hexdigest()[:8]
    name = os.path.basename(dst) or "root"
    return user_state_path("fp8fs") / "logs" / f"{name}-{digest}.log"


@contextlib.contextmanager
def _prepared(spec: MountSpec) -> Iterator[MountSpec]:
    """The spec with absolute paths, all checks passed, DST there. If the body fails, DST is as it was."""
    check_choices(spec.serve, spec.grain)
    src = os.path.realpath(spec.src)
    # Not resolved: the store itself has to see a symlink, which somebody else may have put there.
    store = os.path.abspath(spec.store) if spec.store else ""
    dst = resolve(spec.dst, read_mountinfo())
    check_places(src, dst, os.path.realpath(store) if store else "")
    check_fuse(allow_other=spec.allow_other)
    clean_up_stale(dst)
    serve, warnings = spec.serve, spec.warnings
    if os.geteuid() != 0 and spec.allow_other and serve == "handoff":
        serve = "inline"
        warnings = (
            *warnings,
            "--allow-other without root serves inline: others may not follow links into your store",
        )
    created = ensure_directory(dst, read_mountinfo())
    reserved = -1
    try:
        reserved = _reserve(dst)
        yield msgspec.structs.replace(
            spec,
            src=src,
            dst=dst,
            store=store,
            serve=serve,
            warnings=warnings,
            log_path=os.path.abspath(spec.log_path) if spec.log_path else "",
            created_dst=created,
        )
    except BaseException:
        with undisturbed():
            with contextlib.suppress(
                Fp8fsError
            ):  # a server that was killed leaves its mount behind
                clean_up_stale(dst)
            if created:
                with contextlib.suppress(OSError):
                    os.rmdir(dst)
        raise
    finally:
        if reserved >= 0:
            os.close(reserved)


def _reserve(dst: str) -> int:
    """A lock on the directory below the coming mount, held while the descriptor is open: two mounts at once would pile up."""
    descriptor = os.open(dst, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(descriptor)
        raise MountPointError(f"{dst} is being mounted by another process") from err
    mount = find(dst, read_mountinfo())
    if mount is not None and mount.fstype == FSTYPE:  # the other one was quicker
        os.close(descriptor)
        raise MountPointError(f"{dst} is already mounted, from {mount.source}")
    return descriptor


def _start(
    spec: MountSpec, stderr: int | IO[bytes], lifeline: int = -1
) -> tuple[subprocess.Popen[bytes], int]:
    """The server, running, with its spec; and the descriptor on which it will answer."""
    answers, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "fp8fs.fuse.daemon", spec.dst, str(theirs), str(lifeline)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if stderr == subprocess.PIPE else stderr,
            stderr=stderr,
            pass_fds=[theirs, *([lifeline] if lifeline >= 0 else [])],
            start_new_session=True,
        )
    except BaseException:
        os.close(answers)
        raise
    finally:
        os.close(theirs)
    if server.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            server.stdin.write(encode(spec))
            server.stdin.close()
    return server, answers


def _await_answer(
    server: subprocess.Popen[bytes], answers: int, spec: MountSpec, timeout_s: float
) -> Mounted:
    end = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        if not readable([answers], end - time.monotonic()):
            raise MountError(f"{spec.dst} was not ready after {timeout_s:.0f} s", hint=_see(spec))
        chunk = os.read(answers, 1 << 16)
        if not chunk:
            code = server.wait()
            raise MountError(
                f"the server of {spec.dst} ended with {code} before it was ready", hint=_see(spec)
            )
        line += chunk
    answer = json.loads(line)
    if "error" in answer:
        server.wait()
        raise error_from(answer["error"])
    mounted: Mounted = msgspec.convert(answer["ok"], Mounted)
    return mounted


def _see(spec: MountSpec) -> str:
    return f"see {spec.log_path}" if spec.log_path else "see the messages above"


def _end(server: subprocess.Popen[bytes]) -> None:
    """The server has ended, by itself if it can, so that it takes its mount along."""
    if server.poll() is not None:
        return
    server.terminate()
    try:
        server.wait(8.0)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _open_log(path: str) -> IO[bytes]:
    """The log, appended to, readable for its owner only: it holds names. A large old one is set aside once."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(path).st_size > _LOG_MAX_BYTES:
                os.replace(path, f"{path}.1")
        flags = (
            os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        )
        log = os.fdopen(os.open(path, flags, 0o600), "ab")
    except OSError as err:
        raise MountError(
            f"the log {path} cannot be written: {err.strerror}",
            hint="name a place in XDG_STATE_HOME",
        ) from err
    facts = os.fstat(log.fileno())
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_nlink != 1:
        log.close()
        raise MountError(f"the log {path} is not a file of ours", hint="move it away")
    os.fchmod(log.fileno(), 0o600)
    return log


class _Lines:
    """Whole lines from a pipe, as they come."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        if pipe is None:
            raise MountError("the server has no log pipe")
        self._pipe = pipe
        self._rest = b""
        self.fd = pipe.fileno()
        self.ended = False

    def take(self) -> list[str]:
        chunk = os.read(self.fd, 1 << 16)
        self.ended = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if self.ended and self._rest:
            lines.append(self._rest)
        return [line.decode("utf-8", "replace") for line in lines]

    def close(self) -> None:
        self._pipe.close()
