"""`polar node`: a machine that runs sessions.

| loop | reads | does |
|---|---|---|
| commands | node-commands, from the journal's position | notes and starts sessions, sets READY levels |
| sessions | – | one task each (polar.rollout.session), through the pools |
| heartbeats | – | capacity, READY depth and leases, each second and after a READY command |

Invariants: a session runs at most once on a node (its id is journalled before it starts); a
node that starts ends what its last life left behind, and says so; one failed session never
ends another.
"""

import asyncio
import contextlib
import logging
import secrets
import shutil
from collections import Counter, deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from polar.core.metrics import Metrics
from polar.core.stage import LogRecord, Partition
from polar.errors import LogUnavailableError
from polar.kafka.reader import end_offsets, follow
from polar.kafka.writer import LogWriter
from polar.rollout.gateway_client import GatewayClient
from polar.rollout.journal import Journal
from polar.rollout.pools import PrioritySlots, WarmPool
from polar.rollout.publisher import EventWriter, Publisher
from polar.rollout.runtimes.base import Runtime
from polar.rollout.runtimes.local import LocalRuntime, end_leftovers
from polar.rollout.session import NODE_RESTARTED, NodeParts, SessionRun
from polar.secret import load_secret
from polar.settings import LogSettings, NodeSettings
from polar.telemetry.metrics import expose
from schemas.base import Event
from schemas.nodes import CancelSession, NodeHeartbeat, PrewarmRuntime, StageCounts, StartSession
from schemas.sessions import Outcome, SessionFinished
from schemas.tasks import TaskRequest
from schemas.topics import NODE_COMMANDS

logger = logging.getLogger(__name__)

_FAREWELL_SECONDS = 2.0
_LEAST_PAUSE_SECONDS = 0.1
"""Between two heartbeats, when READY commands come in a row."""
_MAX_LEASES = 4
"""Times max_running: a scheduler that places more has lost count, and is told so."""


class Node:
    """Sessions, pools and heartbeats of one node process."""

    def __init__(
        self,
        settings: NodeSettings,
        directory: Path,
        writer: EventWriter,
        gateway: GatewayClient,
        secret: bytes,
    ) -> None:
        self._settings = settings
        self._runtimes = directory / "runtimes"
        self._runtimes.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(directory / "journal.sqlite")
        self._publisher = Publisher(writer)
        self._incarnation = secrets.token_hex(6)
        self._num_runtimes = 0
        self._retired: deque[Path] = deque()
        self._sessions: dict[str, SessionRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._heartbeats = 0
        self._last_command = ""
        self._has_news = asyncio.Event()
        init_slots = PrioritySlots(settings.init_workers)
        self._warm = WarmPool(init_slots, settings.max_ready, self._make_runtime)
        self._parts = NodeParts(
            settings=settings,
            secret=secret,
            journal=self._journal,
            publisher=self._publisher,
            gateway=gateway,
            init_slots=init_slots,
            run_slots=asyncio.Semaphore(settings.max_running),
            postrun_slots=asyncio.Semaphore(settings.postrun_workers),
            warm=self._warm,
            make_runtime=self._make_runtime,
            retire=self._retire,
        )

    # -- life ---------------------------------------------------------------------------------

    async def recover(self) -> None:
        """End what an earlier life left running; its sessions are sealed and reported."""
        await end_leftovers(self._journal, self._runtimes)
        old = sorted(self._runtimes.iterdir(), key=lambda path: path.stat().st_mtime)
        self._retired.extend(old)
        self._remove_old()
        for unfinished in self._journal.unfinished():
            logger.warning("session %s was cut off by a restart", unfinished.command.session_id)
            run = SessionRun(unfinished.command, self._parts)
            self._supervise(run, run.refuse(NODE_RESTARTED, touched_gateway=unfinished.touched_gateway))

    async def stop(self) -> None:
        """End all processes. Sessions stay in the journal: the next life reports them."""
        with contextlib.suppress(TimeoutError, LogUnavailableError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                await self._publisher.publish(self.heartbeat(draining=True))
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._warm.close()
        self._journal.close()

    def positions(self) -> dict[int, int]:
        """Partition of node-commands → next offset; empty for a new node."""
        return self._journal.positions()

    def begin_at(self, ends: dict[int, int]) -> None:
        """A new node: commands from before it existed are not for it."""
        for partition, offset in ends.items():
            self._journal.advance(partition, offset)

    # -- commands -----------------------------------------------------------------------------

    def on_record(self, record: LogRecord) -> None:
        """Handle one record of node-commands; what it starts goes on by itself."""
        event: Event = record.event
        partition, following = record.partition.number, record.offset + 1
        if getattr(event, "node_id", None) != self._settings.id:
            return
        if isinstance(event, StartSession):
            if self._journal.accept(event, partition, following):
                run = SessionRun(event, self._parts)
                is_full = len(self._sessions) >= _MAX_LEASES * self._settings.max_running
                self._supervise(run, run.refuse("the node is full") if is_full else run.run())
            return
        if isinstance(event, PrewarmRuntime):
            self._warm.set_level(event)
            self._last_command = event.command_id
            self._has_news.set()
        elif isinstance(event, CancelSession) and (run_now := self._sessions.get(event.session_id)):
            run_now.cancel(event.reason)
        self._journal.advance(partition, following)

    def _supervise(self, run: SessionRun, work: Coroutine[Any, Any, None]) -> None:
        session_id = run.start.session_id
        self._sessions[session_id] = run
        task = asyncio.create_task(self._to_the_end(run, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _to_the_end(self, run: SessionRun, work: Coroutine[Any, Any, None]) -> None:
        """The session's own task; a defect in it is reported as an infrastructure error."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        try:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                start = run.start
                logger.error("session %s failed on its node", start.session_id, exc_info=error)
                await self._publisher.publish(
                    SessionFinished(
                        session_id=start.session_id,
                        group_id=start.group_id,
                        node_id=start.node_id,
                        outcome=Outcome.INFRA_ERROR,
                        reason=f"internal error: {error!r}",
                        sealed=False,
                    )
                )
                self._journal.finish(start.session_id)
        finally:
            del self._sessions[run.start.session_id]

    # -- heartbeats ---------------------------------------------------------------------------

    async def beat(self) -> None:
        """Write heartbeats for ever."""
        while True:
            self._has_news.clear()
            await self._publisher.publish(self.heartbeat())
            await asyncio.sleep(_LEAST_PAUSE_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._has_news.wait(), max(self._settings.heartbeat_seconds - _LEAST_PAUSE_SECONDS, 0.01)
                )

    def heartbeat(self, *, draining: bool = False) -> NodeHeartbeat:
        """The node as it is now."""
        self._heartbeats += 1
        return NodeHeartbeat(
            node_id=self._settings.id,
            incarnation=self._incarnation,
            seq=self._heartbeats,
            max_sessions=self._settings.max_running,
            max_ready=self._settings.max_ready,
            counts=self._counts(),
            ready_digests=self._warm.held(),
            leases=tuple(self._sessions),
            last_command=self._last_command,
            draining=draining,
        )

    def metrics(self) -> Metrics:
        """See polar.core.metrics."""
        return {
            "runtimes_by_phase": self._counts().model_dump(),
            "leases": len(self._sessions),
            "kept_runtimes": len(self._retired),
        }

    def _counts(self) -> StageCounts:
        phases = Counter(run.phase for run in self._sessions.values())
        return StageCounts(
            initializing=phases["initializing"] + self._warm.num_warming,
            ready=self._warm.depth,
            running=phases["running"],
            postrun=phases["postrun"],
        )

    # -- runtimes -----------------------------------------------------------------------------

    def _make_runtime(self, task: TaskRequest) -> Runtime:
        self._num_runtimes += 1
        directory = self._runtimes / f"{self._incarnation}-{self._num_runtimes}"
        return LocalRuntime(directory.absolute(), task.runtime, self._journal)

    def _retire(self, runtime: Runtime) -> None:
        self._retired.append(runtime.directory)
        self._remove_old()

    def _remove_old(self) -> None:
        while len(self._retired) > self._settings.keep_runtimes:
            path = self._retired.popleft()
            task = asyncio.ensure_future(asyncio.to_thread(shutil.rmtree, path, ignore_errors=True))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def serve(log: LogSettings, settings: NodeSettings) -> None:
    """Run the node until cancelled."""
    secret = load_secret(log)
    directory = log.data_dir.absolute() / f"node-{settings.id}"
    async with LogWriter(log) as writer, GatewayClient(secret) as gateway:
        node = Node(settings, directory, writer, gateway, secret)
        try:
            if not node.positions():
                ends = await end_offsets(log, NODE_COMMANDS)
                node.begin_at({partition.number: end for partition, end in ends.items()})
            start = {
                Partition(NODE_COMMANDS.suffix, number): offset for number, offset in node.positions().items()
            }
            await node.recover()
            expose(node.metrics)
            logger.info("node %s is up, runtimes in %s", settings.id, directory)
            async with asyncio.TaskGroup() as loops:
                loops.create_task(node.beat())
                loops.create_task(_follow_commands(node, log, start))
        finally:
            await node.stop()


async def _follow_commands(node: Node, log: LogSettings, start: dict[Partition, int]) -> None:
    async with contextlib.aclosing(follow(log, NODE_COMMANDS, start=start)) as records:
        async for record in records:
            node.on_record(record)
