"""`polar stitcher`, `polar grouper` and `polar packer` as processes that a test may kill."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from polar.settings import LogSettings

NAMES = ("stitcher", "grouper", "packer")

_STARTED = "app started successfully"
_START_SECONDS = 120.0


class StageProcesses:
    """One process a stage, each with its output in a file of `folder`."""

    def __init__(self, log: LogSettings, folder: Path, **env: str) -> None:
        self._folder = folder
        self._env = os.environ | env
        for name in LogSettings.model_fields:
            value = getattr(log, name)
            if value is not None:
                self._env[f"POLAR_{name.upper()}"] = str(value)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: Counter[str] = Counter()
        self.kills = 0
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        self._starts[name] += 1
        program = "from polar.cli.main import main; main()"
        with (self._folder / f"{name}.log").open("ab") as output:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-c", program, name],
                env=self._env | {"POLAR_MEMBER_ID": "0"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    async def kill(self, name: str) -> None:
        """kill -9 once it is at work (not while it imports), then a new process."""
        deadline = time.monotonic() + _START_SECONDS
        while self._log(name).count(_STARTED) < self._starts[name]:
            self.check()
            assert time.monotonic() < deadline, self.tail(name)
            await asyncio.sleep(0.1)
        process = self._running[name]
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.kills += 1
        self.start(name)

    def check(self) -> None:
        """None of them may have ended by itself."""
        for name, process in self._running.items():
            assert process.poll() is None, self.tail(name)

    def tail(self, name: str) -> str:
        return f"{name}:\n{self._log(name)[-4000:]}"

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> dict[str, int]:
        """SIGTERM; exit status by name."""
        for process in self._running.values():
            process.terminate()
        return {name: process.wait(timeout=30) for name, process in self._running.items()}
