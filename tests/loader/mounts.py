"""A mount for engines to read: cold on an empty store, then warm, with what was made counted from outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.acceptance.harness import Fp8fs, objects


class MountedView:
    """A mount of *source* at ``path``, by the command line; ``folder`` holds its store too."""

    def __init__(self, source: Path, folder: Path, options: tuple[object, ...]) -> None:
        folder.mkdir()
        self.path = folder / "view"
        self._command = Fp8fs(folder / "store")
        self._source, self._options = source, options
        self._is_mounted = False
        self._mount()

    def status(self) -> dict[str, Any]:
        return self._command.status(self.path)

    def ignored_layers(self) -> list[str]:
        """What the view of a pipeline tells an engine to build unquantized."""
        config = json.loads((self.path / "transformer" / "config.json").read_bytes())
        ignored: list[str] = config["quantization_config"]["ignored_layers"]
        return ignored

    def assert_made_once(self) -> None:
        """Every planned unit was made, none twice: what was written is what the plan has."""
        status = self.status()
        assert status["errors"] == []
        assert status["units"]["made"] == status["units"]["total"] > 0
        assert status["shards"]["sealed"] == status["shards"]["total"]

    def remount(self) -> None:
        """Unmount and mount again on the same store."""
        self._sealed = objects(self._command.store)
        self.unmount()
        self._mount()

    def assert_nothing_made(self) -> None:
        """Since ``remount``, no unit was made and every object is the same file."""
        assert self.status()["units"]["made"] == 0
        assert self._sealed
        assert objects(self._command.store) == self._sealed

    def unmount(self) -> None:
        if self._is_mounted:
            self._command.unmount(self.path)
            self._is_mounted = False

    def _mount(self) -> None:
        self._command.mount(self._source, self.path, *self._options)
        self._is_mounted = True


def cold_and_warm(view: MountedView, read: Callable[[Path], Any]) -> Any:
    """What *read* makes of the view while it is filled, which is what it makes of it afterwards.

    Every unit is made once then, and none again.
    """
    cold = read(view.path)
    view.assert_made_once()
    view.remount()
    warm = read(view.path)
    view.assert_nothing_made()
    assert cold == warm
    return cold
