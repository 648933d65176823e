"""Starts a vLLM server, waits for it, and stops all of it.

Invariant: no process of the server outlives the process that started it. The server leads a
process group; the kernel kills the leader when its parent is gone, and the rest of the group
watches the leader (polar.engines.process_group).
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from polar.engines.model_cache import Progress, silent
from polar.engines.vllm_command import has_gpu, launch_command, launch_environment
from polar.errors import EngineError
from polar.settings import EngineSettings
from polar.supervision.processes import start_child

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_KILL_SECONDS = 5.0
"""Longest wait for killed processes to be gone."""
_USUAL_START_SECONDS = 60.0
"""Only for the progress bar: a cold start on two cores."""


class VllmServer:
    """One server and its processes."""

    def __init__(self, settings: EngineSettings, *, log_file: Path | None = None) -> None:
        """`log_file` gets the server's output; without one it goes to this process's stderr."""
        self._settings = settings
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        """URL without /v1."""
        return f"http://{self._settings.host}:{self._settings.port}"

    def start(self) -> None:
        """Start it; call from the main thread. Raises SettingsError when no usable model is named."""
        command = launch_command(self._settings, seed=secrets.randbelow(1 << 31))
        environment = launch_environment(
            self._settings, os.environ, has_gpu=has_gpu(), num_cpus=len(os.sched_getaffinity(0))
        )
        with self._output() as output:
            self._process = start_child(command, env=environment, log=output)

    def poll(self) -> int | None:
        """Exit status of the server process, None while it runs. Raises EngineError before start()."""
        return self._started().poll()

    def wait(self) -> int:
        """Exit status, once it has ended. Raises EngineError before start()."""
        return self._started().wait()

    def wait_until_healthy(self, *, timeout_seconds: float = 300.0, progress: Progress = silent) -> float:
        """Seconds that it took. Raises EngineError when the server ends or is not ready in time."""
        started = time.monotonic()
        while not self._is_healthy():
            seconds = time.monotonic() - started
            status = self.poll()
            if status is not None:
                raise EngineError(f"vLLM ended with status {status} while starting{self._last_words()}")
            if seconds > timeout_seconds:
                raise EngineError(f"vLLM is not healthy after {timeout_seconds:.0f} s{self._last_words()}")
            progress("starting vLLM", min(0.99, seconds / _USUAL_START_SECONDS))
            time.sleep(_POLL_SECONDS)
        progress("vLLM is ready", 1.0)
        return time.monotonic() - started

    def stop(self, *, grace_seconds: float = 10.0) -> None:
        """Ask it to end, then kill the whole group; returns when no process of it is left."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_seconds)
        # A dead leader's children are still in its group.
        deadline = time.monotonic() + _KILL_SECONDS
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(process.pid, signal.SIGKILL)
                process.poll()
                time.sleep(0.02)
        self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise EngineError("the vLLM server has not been started")
        return self._process

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    @contextlib.contextmanager
    def _output(self) -> Iterator[IO[bytes]]:
        if self._log_file is None:
            yield sys.stderr.buffer
            return
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as output:
            yield output

    def _last_words(self, num_lines: int = 15) -> str:
        if self._log_file is None or not self._log_file.is_file():
            return "; its output says why"
        lines = self._log_file.read_text(errors="replace").splitlines()
        return ":\n" + "\n".join(lines[-num_lines:])


async def serve(settings: EngineSettings) -> None:
    """Run a server until cancelled. Raises EngineError when it ends by itself."""
    server = VllmServer(settings)
    server.start()
    logger.info("engine_id=%s serves %s at %s", settings.id, settings.model_path, server.base_url)
    try:
        status = await asyncio.to_thread(server.wait)
        raise EngineError(f"vLLM ended with status {status}; its output says why")
    finally:
        await asyncio.to_thread(server.stop)
