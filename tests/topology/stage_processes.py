"""`polar stitcher`, `polar grouper` and `polar packer` as processes that a test may kill."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from polar.settings import LogSettings

NAMES = ("stitcher", "grouper", "packer")


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
        self.kills = 0
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        program = "from polar.cli.main import main; main()"
        with (self._folder / f"{name}.log").open("ab") as output:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-c", program, name],
                env=self._env | {"POLAR_MEMBER_ID": "0"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: str) -> None:
        """kill -9, then a new process."""
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
        text = (self._folder / f"{name}.log").read_text(errors="replace")
        return f"{name}:\n{text[-4000:]}"

    def stop(self) -> dict[str, int]:
        """SIGTERM; exit status by name."""
        for process in self._running.values():
            process.terminate()
        return {name: process.wait(timeout=30) for name, process in self._running.items()}
