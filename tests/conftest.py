"""What all tests share: hypothesis profiles, and skips that a required machine turns into failures.

``FP8FS_REQUIRE=fuse,gpu,transformers`` names what must be there: where it is missing the tests fail
instead of skipping. ``FP8FS_LONG=1`` asks for the long targets: more rounds, more steps, more examples.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

# In the background of a script, or below nohup, these are ignored, and so would be by whatever the tests start.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

LONG = bool(os.environ.get("FP8FS_LONG"))

settings.register_profile("dev", deadline=None, max_examples=100)
settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True, print_blob=True)
settings.register_profile(
    "nightly",
    deadline=None,
    max_examples=3000,
    suppress_health_check=[HealthCheck.too_slow],
)
_profile = "nightly" if LONG else "ci" if os.environ.get("CI") else "dev"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", _profile))


def _no_fuse() -> str:
    """Why FUSE mounts cannot be made here, "" if they can."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as err:
        return f"/dev/fuse: {err.strerror}"
    for name in ("libfuse3.so.3", "libfuse3.so.4"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return ""
    return "libfuse 3 is not installed"


def _no_gpu() -> str:
    if not os.path.exists("/dev/nvidia0"):
        return "no NVIDIA device"
    return "" if importlib.util.find_spec("torch") else "torch is not installed"


_PROBES: dict[str, Callable[[], str]] = {"fuse": _no_fuse, "gpu": _no_gpu}


def required(what: str) -> bool:
    """Whether FP8FS_REQUIRE names it."""
    return what in os.environ.get("FP8FS_REQUIRE", "").split(",")


def skip_or_fail(what: str, why: str) -> None:
    """Skip for a reason, or fail where the machine must have it."""
    if required(what):
        pytest.fail(f"FP8FS_REQUIRE names {what}, but: {why}")
    pytest.skip(why)


def need_package(name: str) -> None:
    """Skip (or fail, where required) without an importable package."""
    if importlib.util.find_spec(name) is None:
        skip_or_fail(name, f"{name} is not installed")


COUNTS = ("faults injected", "crashes", "power losses", "hostile inputs", "machine steps")
"""Properties (``record_property``) of which the summary tells the sum: what a run was good for."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much was tried by the tests that passed."""
    tried = Counter[str]()
    for report in terminalreporter.getreports("passed"):
        tried.update({name: n for name, n in report.user_properties if name in COUNTS})
    for name in COUNTS:
        if tried[name]:
            terminalreporter.write_line(f"{name}: {tried[name]:,}")


_missing: dict[str, str] = {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked ``fuse`` or ``gpu`` need the real thing."""
    for what, probe in _PROBES.items():
        if item.get_closest_marker(what) is None:
            continue
        if what not in _missing:
            _missing[what] = probe()
        if _missing[what]:
            skip_or_fail(what, _missing[what])
