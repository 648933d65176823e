"""Keeps a set of services running: starts them by readiness, restarts what crashes, stops in order.

| loop | waits for | unblocked by |
|---|---|---|
| one task a service: start | its `needs` to be ready once | their probes |
| the same: watch | the process to end | the kernel; then back-off, then start again |
| one task a service: probe | `is_ready` to be true | the service |

Invariant: a service that ends is started again for ever, with back-off, once the deployment has
been up. Before that `START_ATTEMPTS` failures in a row end the whole start with the service's
last words; so does a service that ends with one of its `fatal_statuses` (wrong usage, something
missing) before it was ever ready.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from polar.errors import PolarError
from polar.supervision.processes import MARKER, SERVICE_MARKER, start_child, sweep

logger = logging.getLogger(__name__)

START_ATTEMPTS = 5
_BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)
_HEALTHY_SECONDS = 30.0
"""A process that lived so long starts the back-off anew."""
_PROBE_SECONDS = 0.2

Status = Literal["waiting", "starting", "ready", "restarting", "done", "failed", "stopped"]


class ServiceFailedError(PolarError):
    """A service cannot be brought up; `exit_status` is its own."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One child process."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Added to the supervisor's own environment."""
    late_env: Callable[[], Mapping[str, str]] | None = None
    """More of it, known only when the service starts."""
    needs: tuple[str, ...] = ()
    """Services that must have been ready before the first start."""
    is_ready: Callable[[], Awaitable[bool]] | None = None
    """Probe; none: ready as soon as it runs."""
    one_shot: bool = False
    """Ends by itself: ready when it has ended with status 0."""
    fatal_statuses: frozenset[int] = frozenset({2, 3})
    """Exit statuses that no restart can help, as long as it has never been ready."""
    stop_seconds: float = 10.0
    """From SIGTERM to SIGKILL."""


@dataclass(slots=True)
class ServiceState:
    """What a person or a test wants to know of a service."""

    status: Status = "waiting"
    pid: int | None = None
    restarts: int = 0
    last_exit: int | None = None
    was_ready: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Runs services until stopped. Start it from the main thread: children die with that thread."""

    def __init__(
        self,
        services: Sequence[ServiceSpec],
        *,
        deployment: str,
        state_file: Path,
        log_dir: Path,
        on_change: Callable[[str, ServiceState], None] | None = None,
    ) -> None:
        """`deployment` marks the children; logs go to LOG_DIR/<service>.log."""
        self._services = {spec.name: spec for spec in services}
        self._deployment = deployment
        self._state_file = state_file
        self._log_dir = log_dir
        self._on_change = on_change
        self.states = {spec.name: ServiceState() for spec in services}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._all_ready = asyncio.Event()

    async def run(self, stop: asyncio.Event, *, on_ready: Callable[[], None] | None = None) -> None:
        """Start all, keep them running until `stop` is set, then stop all.

        Raises ServiceFailedError when a service cannot be brought up; everything is down then.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        tasks = [asyncio.create_task(self._keep(spec)) for spec in self._services.values()]
        tasks.append(asyncio.create_task(self._announce(on_ready)))
        stopping = asyncio.create_task(stop.wait())
        try:
            pending = {stopping, *tasks}
            while stopping in pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in (stopping, *tasks):
                task.cancel()
            await asyncio.gather(stopping, *tasks, return_exceptions=True)
            await self._stop_all()

    async def _announce(self, on_ready: Callable[[], None] | None) -> None:
        for state in self.states.values():
            await state.was_ready.wait()
        self._all_ready.set()
        self._write_state()
        if on_ready is not None:
            on_ready()

    async def _keep(self, spec: ServiceSpec) -> None:
        state = self.states[spec.name]
        for name in spec.needs:
            await self.states[name].was_ready.wait()
        failures = 0
        while True:
            started = time.monotonic()
            self._start(spec)
            probe = asyncio.create_task(self._probe(spec))
            try:
                status = await self._wait_for_end(spec.name)
            finally:
                probe.cancel()
            state.last_exit, state.pid = status, None
            if spec.one_shot and status == 0:
                self._set(spec.name, "done")
                state.was_ready.set()
                return
            failures = 1 if time.monotonic() - started > _HEALTHY_SECONDS else failures + 1
            is_first = state.restarts == 0 or not state.was_ready.is_set()
            hopeless = status in spec.fatal_statuses and is_first
            if hopeless or (failures >= START_ATTEMPTS and not self._all_ready.is_set()):
                self._set(spec.name, "failed")
                raise ServiceFailedError(
                    f"{spec.name} ended with status {status}: {self.last_words(spec.name)}", status
                )
            state.restarts += 1
            self._set(spec.name, "restarting")
            logger.warning("%s ended with status %s, starting it again", spec.name, status)
            await asyncio.to_thread(sweep, self._deployment, spec.name)
            await asyncio.sleep(_BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS)) - 1])

    def _start(self, spec: ServiceSpec) -> None:
        late = spec.late_env() if spec.late_env is not None else {}
        env = {**os.environ, **spec.env, **late, MARKER: self._deployment, SERVICE_MARKER: spec.name}
        with self.log_path(spec.name).open("ab") as log:
            process = start_child(spec.argv, env=env, log=log)
        self._processes[spec.name] = process
        self.states[spec.name].pid = process.pid
        self._set(spec.name, "starting")

    async def _probe(self, spec: ServiceSpec) -> None:
        state = self.states[spec.name]
        if spec.one_shot:
            return
        while spec.is_ready is not None and not await spec.is_ready():  # noqa: ASYNC110
            await asyncio.sleep(_PROBE_SECONDS)
        self._set(spec.name, "ready")
        state.was_ready.set()

    async def _wait_for_end(self, name: str) -> int:
        process = self._processes[name]
        if (status := process.poll()) is not None:
            return status
        ended = asyncio.Event()
        handle = os.pidfd_open(process.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        return process.wait()

    async def _stop_all(self) -> None:
        """Services that others need go last; all that do not need one another go together."""
        for names in reversed(_layers(self._services)):
            await asyncio.gather(*(self._stop(name) for name in names))
        await asyncio.to_thread(sweep, self._deployment)
        self._write_state()

    async def _stop(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._services[name].stop_seconds):
                    await self._wait_for_end(name)
        await asyncio.to_thread(sweep, self._deployment, name)
        if process is not None:
            self.states[name].last_exit = await asyncio.to_thread(process.wait)
        self.states[name].pid = None
        self._set(name, "stopped")

    def _set(self, name: str, status: Status) -> None:
        self.states[name].status = status
        self._write_state()
        if self._on_change is not None:
            self._on_change(name, self.states[name])

    def _write_state(self) -> None:
        value = {
            "pid": os.getpid(),
            "ready": self._all_ready.is_set(),
            "services": {
                name: {
                    "status": state.status,
                    "pid": state.pid,
                    "restarts": state.restarts,
                    "last_exit": state.last_exit,
                }
                for name, state in self.states.items()
            },
        }
        draft = self._state_file.with_name(f"{self._state_file.name}.new")
        draft.write_text(json.dumps(value, indent=1) + "\n")
        draft.replace(self._state_file)

    def log_path(self, name: str) -> Path:
        """Where the service's stdout and stderr go."""
        return self._log_dir / f"{name}.log"

    def last_words(self, name: str, *, lines: int = 5) -> str:
        """Last lines of the service's log."""
        path = self.log_path(name)
        if not path.exists():
            return ""
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 8192))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])


def _layers(services: Mapping[str, ServiceSpec]) -> list[list[str]]:
    """Names by depth of their needs. Raises ValueError when needs go in a circle."""
    layers: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(services):
        layer = [
            name for name, spec in services.items() if name not in placed and placed.issuperset(spec.needs)
        ]
        if not layer:
            raise ValueError("services need one another in a circle")
        layers.append(layer)
        placed.update(layer)
    return layers
