"""Server processes of a broker, kept running.

A `Children` object owns one thread that starts its programs in order, waits for each until it
answers, and starts again whichever dies. The thread stays alive as long as the children do,
because the kernel ends a child when the *thread* that started it ends (polar.supervision).

Invariants: nothing outlives `stop()`, nor the process, however it ends; a program that dies is
back within a second; one that cannot stay up is tried more and more rarely, and said aloud.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polar.errors import LogError
from polar.supervision.processes import start_child

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
_STEADY_SECONDS = 30.0
"""A program that ran so long starts again without delay."""
_LOG_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Program:
    """One server program."""

    name: str
    argv: Sequence[str]
    log: Path
    ready: Callable[[], bool]
    """Whether it answers; asked every 0.1 s, must not raise."""
    env: Mapping[str, str] = field(default_factory=dict)
    """In addition to this process's environment."""
    after_ready: Callable[[], None] = lambda: None
    """Runs each time it is up, before the next program starts."""
    grace_seconds: float = 1.0
    """Between SIGTERM and SIGKILL at an orderly stop."""
    ready_seconds: float = 60.0


def listens(port: int) -> bool:
    """Whether something on loopback accepts connections at this port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5):
            return True
    except OSError:
        return False


class Children:
    """Runs programs in order and keeps them up, from a thread of its own."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = tuple(programs)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started_at: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._stopping = threading.Event()
        self._up = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self.restarts = 0
        """Programs started again since `start()`."""

    @property
    def pids(self) -> dict[str, int]:
        """Pid of each program that runs now."""
        return {name: child.pid for name, child in self._running.items() if child.poll() is None}

    def start(self) -> None:
        """Start all; returns when the last one answers. Raises LogError with the log's tail."""
        if self._thread is not None:
            raise RuntimeError("start() was called twice")
        self._thread = threading.Thread(target=self._run, name="broker-supervisor", daemon=True)
        self._thread.start()
        self._up.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def stop(self) -> None:
        """End all, last started first. Does nothing when they were never started."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    # -- the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for program in self._programs:
                self._launch(program)
                self._await_ready(program)
            self._up.set()
            while not self._stopping.wait(_POLL_SECONDS):
                self._revive()
        except Exception as error:  # noqa: BLE001  (handed to the thread that called start())
            self._error = error
        finally:
            for program in reversed(self._programs):
                self._end(program)
            self._up.set()

    def _launch(self, program: Program) -> None:
        program.log.parent.mkdir(parents=True, exist_ok=True)
        with program.log.open("ab") as log:
            self._running[program.name] = start_child(
                program.argv, env={**os.environ, **program.env}, log=log, cwd=program.log.parent
            )
        self._started_at[program.name] = time.monotonic()

    def _await_ready(self, program: Program) -> None:
        child = self._running[program.name]
        deadline = time.monotonic() + program.ready_seconds
        while not program.ready():
            if child.poll() is not None:
                raise LogError(f"{program.name} ended with status {child.returncode}: {_tail(program.log)}")
            if time.monotonic() > deadline:
                raise LogError(
                    f"{program.name} did not answer within {program.ready_seconds:g} s: {_tail(program.log)}"
                )
            if self._stopping.wait(_POLL_SECONDS):
                raise LogError(f"{program.name} was stopped while it started")
        program.after_ready()

    def _revive(self) -> None:
        for program in self._programs:
            child = self._running[program.name]
            if child.poll() is None:
                continue
            if time.monotonic() - self._started_at[program.name] > _STEADY_SECONDS:
                self._failures[program.name] = 0
            failures = self._failures.get(program.name, 0)
            self._failures[program.name] = failures + 1
            pause = _BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)]
            logger.warning(
                "%s ended with status %s, starting it again in %.1f s", program.name, child.returncode, pause
            )
            if self._stopping.wait(pause):
                return
            self._launch(program)
            self.restarts += 1

    def _end(self, program: Program) -> None:
        child = self._running.get(program.name)
        if child is None or child.poll() is not None:
            return
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(program.grace_seconds)
        # The whole group: a launcher script may have children of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return f"no log at {log}"
