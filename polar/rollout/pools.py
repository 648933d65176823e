"""The pools of a node: slots for INIT, and the warm runtimes that wait in READY.

| pool | limit | at the limit | freed by |
|---|---|---|---|
| INIT | init_workers | sessions wait first, warming second | the runtime is prepared or failed |
| READY | the scheduler's levels, max_ready in all | nothing is warmed | a session takes a runtime |
| RUNNING | max_running | sessions wait with their runtime, in order | the harness ended |
| POSTRUN | postrun_workers | sessions wait, their run slot is free | rewards are on the log |

Invariant: warm and warming runtimes of a digest never exceed its level, nor all of them
`max_ready`.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from polar.errors import RuntimeFailedError
from polar.rollout.runtimes.base import Runtime
from schemas.nodes import PrewarmRuntime
from schemas.tasks import TaskRequest

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


class PrioritySlots:
    """A semaphore whose urgent waiters go first; each kind in order of arrival."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: tuple[deque[asyncio.Future[None]], deque[asyncio.Future[None]]] = (deque(), deque())

    @contextlib.asynccontextmanager
    async def hold(self, *, urgent: bool) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        await self._acquire(self._waiting[0 if urgent else 1])
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, queue: deque[asyncio.Future[None]]) -> None:
        if self._free > 0:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()
            else:
                queue.remove(turn)
            raise

    def _release(self) -> None:
        for queue in self._waiting:
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self._free += 1


@dataclass(slots=True)
class _Level:
    task: TaskRequest
    count: int = 0
    idle: deque[Runtime] = field(default_factory=deque)
    warming: set[asyncio.Task[None]] = field(default_factory=set)
    failures: int = 0

    @property
    def held(self) -> int:
        return len(self.idle) + len(self.warming)


class WarmPool:
    """Idle runtimes by digest, kept at the levels that the scheduler asks for."""

    def __init__(self, slots: PrioritySlots, max_ready: int, make: Callable[[TaskRequest], Runtime]) -> None:
        self._slots = slots
        self._max_ready = max_ready
        self._make = make
        self._levels: dict[str, _Level] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def depth(self) -> int:
        """Warm runtimes that no session has taken: the READY depth."""
        return sum(len(level.idle) for level in self._levels.values())

    @property
    def num_warming(self) -> int:
        """Runtimes that are being prepared, or wait for an INIT slot, without a session."""
        return sum(len(level.warming) for level in self._levels.values())

    def held(self) -> dict[str, int]:
        """Warm and warming runtimes by digest."""
        return {digest: level.held for digest, level in sorted(self._levels.items()) if level.held}

    def set_level(self, command: PrewarmRuntime) -> None:
        """Hold `count` runtimes of the digest: warm missing ones, give surplus ones up."""
        level = self._levels.setdefault(command.runtime_digest, _Level(command.task))
        level.task, level.count, level.failures = command.task, command.count, 0
        self._trim(level)
        if not level.count and not level.held:
            del self._levels[command.runtime_digest]
        self._fill()

    def take(self, digest: str) -> Runtime | None:
        """A warm runtime, the oldest; its successor is warmed at once."""
        level = self._levels.get(digest)
        if level is None or not level.idle:
            return None
        runtime = level.idle.popleft()
        self._fill()
        return runtime

    async def close(self) -> None:
        """Give everything up."""
        for level in self._levels.values():
            level.count = 0
            self._trim(level)
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _trim(self, level: _Level) -> None:
        surplus = level.held - level.count
        for warming in list(level.warming)[: max(surplus, 0)]:
            warming.cancel()
            level.warming.discard(warming)
            surplus -= 1
        for _ in range(surplus):
            self._spawn(level.idle.pop().remove())

    def _fill(self) -> None:
        room = self._max_ready - sum(level.held for level in self._levels.values())
        for level in self._levels.values():
            while room > 0 and level.held < level.count:
                room -= 1
                task = self._spawn(self._warm(level))
                level.warming.add(task)

    async def _warm(self, level: _Level) -> None:
        own = asyncio.current_task()
        if level.failures:
            await asyncio.sleep(min(_FIRST_PAUSE_SECONDS * 2 ** (level.failures - 1), _LONGEST_PAUSE_SECONDS))
        task = level.task
        runtime = self._make(task)
        try:
            async with self._slots.hold(urgent=False):
                await runtime.prepare(task.timeouts.init_seconds)
        except RuntimeFailedError as error:
            level.failures += 1
            logger.warning("warming a runtime failed (%d in a row): %s", level.failures, error)
            await runtime.remove()
        except asyncio.CancelledError:
            await runtime.remove()
            raise
        else:
            level.failures = 0
            level.idle.append(runtime)
        finally:
            if own is not None:
                level.warming.discard(own)
        self._fill()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the READY pool failed to warm or remove a runtime", exc_info=error)
