"""One session on its node, from INIT to SessionFinished.

    INIT ─▶ READY (waits for a run slot) ─▶ RUNNING ─▶ POSTRUN: seal ─▶ evaluate ─▶ SessionFinished

Invariants: whatever happens, the session ends with one SessionFinished, after its seal and its
rewards; failures of runtime, node or gateway are `infra_error` with a reason, never the agent's;
nothing of the session's runtime is alive when it ends.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from polar.core.session_keys import SessionClaims, mint
from polar.errors import GatewayError, PolarError, RuntimeFailedError
from polar.rollout.evaluators.command import evaluate
from polar.rollout.gateway_client import GatewayClient
from polar.rollout.harnesses.shell import Connection, harness_environment
from polar.rollout.journal import Journal
from polar.rollout.pools import PrioritySlots, WarmPool
from polar.rollout.processes import CommandResult
from polar.rollout.publisher import Publisher
from polar.rollout.runtimes.base import Runtime
from polar.settings import NodeSettings
from schemas.nodes import StartSession
from schemas.sessions import Outcome, SessionFinished, SessionReady, SessionStarted
from schemas.tasks import TaskRequest

logger = logging.getLogger(__name__)

_KEY_MARGIN_SECONDS = 600.0
"""A key outlives the run budget by this: for outages between opening and start."""
NODE_RESTARTED = "node_restarted"
"""Reason of sessions that a node's earlier life left unfinished."""


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What all sessions of a node share."""

    settings: NodeSettings
    secret: bytes
    journal: Journal
    publisher: Publisher
    gateway: GatewayClient
    init_slots: PrioritySlots
    run_slots: asyncio.Semaphore
    postrun_slots: asyncio.Semaphore
    warm: WarmPool
    make_runtime: Callable[[TaskRequest], Runtime]
    retire: Callable[[Runtime], None]
    """Takes the runtime of a finished session: its directory may stay for a while."""


@dataclass(frozen=True, slots=True)
class _Ending:
    outcome: Outcome
    reason: str
    run_seconds: float = 0.0


class SessionRun:
    """Runs one StartSession. `phase` tells the pool that the session is in."""

    def __init__(self, start: StartSession, parts: NodeParts) -> None:
        self.start = start
        self.phase = "initializing"
        """initializing, ready, running or postrun."""
        self._parts = parts
        self._runtime: Runtime | None = None
        self._touched_gateway = False
        self._work: asyncio.Task[_Ending] | None = None
        self._cancel_reason: str | None = None

    def cancel(self, reason: str) -> None:
        """End it as `cancelled`, unless its harness has ended already."""
        if self._cancel_reason is None:
            self._cancel_reason = reason
        if self._work is not None:
            self._work.cancel()

    async def run(self) -> None:
        """To the end. Cancelling this task ends its processes and leaves the rest to the journal."""
        ending = await self._until_ended()
        self.phase = "postrun"
        try:
            async with self._parts.postrun_slots:
                finished = await self._postrun(ending)
        finally:
            if self._runtime is not None:
                await self._runtime.close()
                self._parts.retire(self._runtime)
        await self._parts.publisher.publish(finished)
        self._parts.journal.finish(self.start.session_id)
        logger.info(
            "session %s finished: %s %s", self.start.session_id, finished.outcome.value, finished.reason
        )

    async def refuse(self, reason: str, *, touched_gateway: bool = False) -> None:
        """Finish a session that this node does not run, as an infrastructure error.

        `touched_gateway`: an earlier life of the node may have opened it.
        """
        self.phase = "postrun"
        self._touched_gateway = touched_gateway
        async with self._parts.postrun_slots:
            finished = await self._postrun(_Ending(Outcome.INFRA_ERROR, reason))
        await self._parts.publisher.publish(finished)
        self._parts.journal.finish(self.start.session_id)

    async def _until_ended(self) -> _Ending:
        """INIT to the end of the harness; every failure on the way becomes an ending."""
        if self._cancel_reason is not None:
            return _Ending(Outcome.CANCELLED, self._cancel_reason)
        self._work = work = asyncio.create_task(self._init_and_run())
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work})
            raise
        if work.cancelled():
            return _Ending(Outcome.CANCELLED, self._cancel_reason or "cancelled")
        error = work.exception()
        if error is None:
            return work.result()
        if not isinstance(error, PolarError):
            logger.error("session %s failed on its node", self.start.session_id, exc_info=error)
            return _Ending(Outcome.INFRA_ERROR, f"internal error: {error!r}")
        return _Ending(Outcome.INFRA_ERROR, str(error))

    async def _init_and_run(self) -> _Ending:
        runtime, warm = await self._take_runtime()
        self.phase = "ready"
        async with self._parts.run_slots:
            self.phase = "running"
            connection = await self._open()
            where = {"group_id": self.start.group_id, "node_id": self.start.node_id}
            await self._parts.publisher.publish(
                SessionReady(session_id=self.start.session_id, warm=warm, **where),
                SessionStarted(session_id=self.start.session_id, **where),
            )
            result = await runtime.run(
                self.start.task.harness.command,
                env=harness_environment(self.start, connection),
                timeout_seconds=self.start.task.timeouts.run_seconds,
                name="harness",
            )
            return _ending_of(result)

    async def _take_runtime(self) -> tuple[Runtime, bool]:
        parts = self._parts
        runtime = parts.warm.take(self.start.runtime_digest)
        is_warm = runtime is not None
        if runtime is None:
            runtime = parts.make_runtime(self.start.task)
        self._runtime = runtime
        parts.journal.note_runtime(self.start.session_id, str(runtime.directory))
        logger.info("session %s runs in %s", self.start.session_id, runtime.directory)
        if not is_warm:
            async with parts.init_slots.hold(urgent=True):
                await runtime.prepare(self.start.task.timeouts.init_seconds)
        return runtime, is_warm

    async def _open(self) -> Connection:
        start, parts = self.start, self._parts
        now = time.time()
        expires_at = now + start.task.timeouts.run_seconds + _KEY_MARGIN_SECONDS
        seconds = start.task.limits.max_seconds
        parts.journal.note_gateway(start.session_id)
        self._touched_gateway = True
        await parts.gateway.open_session(start, expires_at, parts.settings.gateway_wait_seconds)
        claims = SessionClaims(
            session_id=start.session_id,
            group_id=start.group_id,
            gateway_id=start.gateway_id,
            expires_at=expires_at,
            sampling=start.task.sampling,
            limits=start.task.limits,
            calls_end_at=None if seconds is None else now + seconds,
        )
        return Connection(start.gateway_url, mint(parts.secret, claims))

    async def _postrun(self, ending: _Ending) -> SessionFinished:
        start, parts = self.start, self._parts
        outcome, reason, calls, is_sealed = ending.outcome, ending.reason, 0, True
        if self._touched_gateway:
            try:
                calls = await parts.gateway.seal_session(
                    start, outcome, reason, parts.settings.seal_wait_seconds
                )
            except GatewayError as error:
                is_sealed = False
                reason = "; ".join(filter(None, (reason, str(error))))
                # Its calls may be lost with the gateway; the agent is not to blame for that.
                outcome = outcome if outcome is Outcome.CANCELLED else Outcome.INFRA_ERROR
        is_scored = is_sealed and outcome in (Outcome.COMPLETED, Outcome.AGENT_ERROR)
        if is_scored and start.task.evaluator.kind == "command" and self._runtime is not None:
            try:
                rewards = await evaluate(start, self._runtime, outcome)
            except RuntimeFailedError as error:
                logger.warning("session %s has no score: %s", start.session_id, error)
                reason = "; ".join(filter(None, (reason, str(error))))
            else:
                await parts.publisher.publish(*rewards)
        return SessionFinished(
            session_id=start.session_id,
            group_id=start.group_id,
            node_id=start.node_id,
            outcome=outcome,
            reason=reason,
            sealed=is_sealed,
            calls=calls,
            run_seconds=round(ending.run_seconds, 3),
        )


def _ending_of(result: CommandResult) -> _Ending:
    if result.status is None:
        return _Ending(Outcome.TIMED_OUT, f"the harness used up {result.seconds:.1f} s", result.seconds)
    if result.status == 0:
        return _Ending(Outcome.COMPLETED, "", result.seconds)
    return _Ending(Outcome.AGENT_ERROR, f"the harness ended with {result.words}", result.seconds)
