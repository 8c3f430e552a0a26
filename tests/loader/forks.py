"""Runs scripts of ``engine_side/`` many times with one import of their engine: each run is a fork of one process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.loader import harness


class ForkedScripts:
    """Scripts of ``engine_side/`` that have ``load_engine``, ``arguments`` and ``main``, their engine imported.

    Close it: the process and whatever its runs left end then.
    """

    def __init__(self, engine: str, *scripts: str, log: Path) -> None:
        command = [harness.engine_python(engine), harness.ENGINE_SIDE / "forking.py", *scripts]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=harness.environment(),
                start_new_session=True,
            )
        self._reply(log)

    def run(self, script: str, *arguments: object, workdir: Path) -> Any:
        """The result of one run. It logs to ``workdir/log0.txt``.

        Raises: AssertionError with the end of the log if the run fails or takes too long.
        """
        return self.run_all(script, [arguments], workdir=workdir)[0]

    def run_all(
        self,
        script: str,
        argument_lists: Sequence[Sequence[object]],
        *,
        workdir: Path,
        site: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """One run per argument list, all at the same time; their results in order. Run N logs to ``workdir/logN.txt``.

        ``site``: a folder with more packages, such as ``install_plugin`` makes; ``settings``: environment variables.
        Raises: AssertionError with the end of the log if any run fails or takes too long; all are ended then.
        """
        workdir.mkdir(parents=True, exist_ok=True)
        results = [workdir / f"result{number}.json" for number in range(len(argument_lists))]
        logs = [workdir / f"log{number}.txt" for number in range(len(argument_lists))]
        request = {
            "script": script,
            "runs": [
                {"arguments": [*map(str, arguments), "--result", str(result)], "log": str(log)}
                for arguments, result, log in zip(argument_lists, results, logs, strict=True)
            ],
            "packages": [str(site)] if site else [],
            "settings": dict(settings or {}),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(request)}\n".encode())
        self._process.stdin.flush()
        codes = self._reply(logs[0])
        # The others were killed when one failed: that one's log says why.
        for code, log in sorted(zip(codes, logs, strict=True), reverse=True):
            assert code == 0, f"{script}: exit {code}:\n{harness.end_of(log)}"
        return [json.loads(result.read_text()) for result in results]

    def close(self) -> None:
        """End the process group."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _reply(self, log: Path) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], harness.TIMEOUT_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.close()
            raise AssertionError(
                f"died, or took over {harness.TIMEOUT_S} s:\n{harness.end_of(log)}"
            )
        return json.loads(line)
