"""The scheduler as a pure stage: tasks, session lifecycles and heartbeats in, decisions out.

    tasks ─▶ GroupOpened ─▶ SessionRequested ─▶ StartSession ─▶ (node) ─▶ SessionFinished
             └──────────── each is read back from the log before the next is written ───┘
                                                       all ended ─▶ GroupMembersFixed

A start reads every topic to its end, claims the next epoch with SchedulerStarted, and decides
nothing before that record was read back. Session ids carry the epoch, so a scheduler never
asks for an id that another one may have used.

Invariants: no session is placed twice; every decision is an event and takes effect when it is
read back; offsets are committed below the oldest open task; what runs on a node or behind a
gateway that stays silent is given up after its time-out and tried again elsewhere.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from polar.core.finished_tasks import FinishedTasks
from polar.core.fleet import Fleet, NodePresence, best_node, free_slots
from polar.core.lifecycle import IllegalTransitionError, LifecycleEvent, SessionState
from polar.core.metrics import Metrics
from polar.core.open_keys import OpenKeys
from polar.core.ready_planner import Demand, ReadyPlanner
from polar.core.scheduling_state import SchedulingLimits, Session, Task
from polar.core.stage import DeadLettered, Emit, LogRecord, Output, Partition
from polar.core.task_book import OPENED_AT, TaskBook, cancel_command
from schemas.group_events import GroupMembersFixed, GroupOpened, GroupSealed
from schemas.nodes import CancelSession, GatewayHeartbeat, NodeHeartbeat, SchedulerStarted
from schemas.sessions import (
    SessionFinished,
    SessionLost,
    SessionReady,
    SessionRequested,
    SessionStarted,
)
from schemas.tasks import RolloutTask, TaskCancelled
from schemas.topics import GROUP_EVENTS, NODES, SESSIONS, TASKS, TopicSpec

INPUTS: tuple[TopicSpec, ...] = (TASKS, SESSIONS, NODES, GROUP_EVENTS)
READ_FROM_BEGINNING: tuple[TopicSpec, ...] = (NODES, GROUP_EVENTS)

_COMMITTED = frozenset((TASKS.suffix, SESSIONS.suffix))
_NO_LIMIT = 1 << 60


class SchedulerCore:
    """StageCore over INPUTS; must be given all partitions of each."""

    def __init__(self, limits: SchedulingLimits) -> None:
        self._limits = limits
        self._counts: Counter[str] = Counter()
        self._newest_epoch = 0
        self._reset()

    def _reset(self) -> None:
        limits = self._limits
        self.finished = FinishedTasks(limits.max_history, limits.max_remembered)
        self.book = TaskBook(limits, self.finished)
        self.fleet = Fleet(limits.node_timeout, limits.gateway_timeout)
        # The table is bounded here, by refusing tasks, and not by the keys: while catching up
        # closed tasks count until their GroupMembersFixed has been read.
        self._keys = OpenKeys(max_open=_NO_LIMIT)
        self._planner = ReadyPlanner(limits.ready_target, 0)
        self._starts: dict[Partition, int] = {}
        self._positions: dict[Partition, int] = {}
        self._behind: set[Partition] = set()
        self._claimed_at: float | None = None
        self.is_deciding = False

    # -- StageCore --------------------------------------------------------------------------

    def on_assigned(self, ends: Mapping[Partition, tuple[int, int]]) -> None:
        """See StageCore."""
        self._keys.assigned(ends)
        for partition, (first, end) in ends.items():
            self._starts[partition] = self._positions[partition] = first
            if first < end:
                self._behind.add(partition)

    def on_revoked(self, partitions: Iterable[Partition]) -> None:
        """Another process schedules now: forget everything, what is needed is read again."""
        del partitions
        self._reset()

    def on_caught_up(self, partition: Partition, now: float) -> list[Output]:
        """See StageCore. The last partition's leads to the claim of an epoch."""
        self._behind.discard(partition)
        return self._claim(now)

    def on_record(self, record: LogRecord, now: float) -> list[Output]:
        """See StageCore."""
        self._keys.seen(record)
        self._positions[record.partition] = record.offset + 1
        if self.is_deciding:
            self.fleet.hear(now)
        out: list[Output] = []
        match record.event:
            case RolloutTask() as event:
                out += self._on_task(record, event, now)
            case TaskCancelled() as event:
                out += self._settle(self.book.cancel_task(event), now)
            case (
                SessionRequested() | SessionReady() | SessionStarted() | SessionFinished() | SessionLost()
            ) as event:
                out += self._on_session(record, event, now)
            case GroupOpened() as event:
                opened_at = _seconds(record.headers.get(OPENED_AT), now)
                self.finished.on_opened(event, opened_at)
                out += self._settle(self.book.on_group_opened(event.group_id), now)
            case GroupMembersFixed() as event:
                if self.finished.on_fixed(event):
                    out += self._settle(self.book.on_members_fixed(event.group_id), now)
            case GroupSealed() as event:
                self.finished.on_sealed(event)
            case NodeHeartbeat() as event:
                out += self._on_node(event, now)
            case GatewayHeartbeat() as event:
                self.fleet.on_gateway(event, now, is_fresh=self.is_deciding)
            case SchedulerStarted() as event:
                out += self._on_scheduler(event, now)
            case _:
                out.append(DeadLettered(record, "unexpected_type", type(record.event).__name__))
        if self.is_deciding:
            out += self._plan(now)
        return out

    def on_tick(self, now: float) -> list[Output]:
        """See StageCore. Time-outs, deadlines and everything that is to be written again."""
        if not self.is_deciding:
            return self._claim(now)
        out: list[Output] = []
        for session in list(self.book.live.values()):
            out += self._check(session, now)
        for node in self.fleet.nodes.values():
            out += self._cancel_unwanted(node, now)
        for task in list(self.book.tasks.values()):
            if task.opened_at is None:
                if task.open_written_at is not None:
                    out += self.book.open_group(task, now)
                continue
            if not task.is_fixed and now - task.opened_at >= task.spec.timeouts.group_seconds:
                out += self.book.fix_members(task, now, at_deadline=True)
            out += self._settle(task, now)
        return out + self._plan(now)

    def commit_offsets(self) -> Mapping[Partition, int]:
        """See StageCore. Nothing before all topics were read: sessions may precede their tasks."""
        if not self.is_deciding:
            return {}
        return {
            partition: offset
            for partition, offset in self._keys.commit_offsets().items()
            if partition.topic in _COMMITTED
        }

    def metrics(self) -> Metrics:
        """See StageCore."""
        heartbeats = [
            node.heartbeat for node in self.fleet.nodes.values() if node.heartbeat and node.is_confirmed
        ]
        return {
            "is_deciding": float(self.is_deciding),
            "epoch": float(self.book.epoch),
            "open_tasks": float(len(self.book.tasks)),
            "live_sessions": float(len(self.book.live)),
            "waiting_members": float(self.book.num_waiting),
            "ready_depth": float(sum(heartbeat.counts.ready for heartbeat in heartbeats)),
            "finished_tasks": float(len(self.finished)),
            **{name: float(count) for name, count in sorted(self._counts.items())},
        }

    # -- epochs -----------------------------------------------------------------------------

    def _claim(self, now: float) -> list[Output]:
        is_ready = bool(self._starts) and not self._behind and not self.is_deciding
        is_due = self._claimed_at is None or now - self._claimed_at >= self._limits.retry_after
        if not is_ready or not is_due:
            return []
        self._claimed_at = now
        self.book.epoch = self._newest_epoch + 1
        return [Emit(SchedulerStarted(epoch=self.book.epoch))]

    def _on_scheduler(self, event: SchedulerStarted, now: float) -> list[Output]:
        self._newest_epoch = max(self._newest_epoch, event.epoch)
        if self._claimed_at is None:
            return []
        if event.epoch > self.book.epoch:
            # A later scheduler took over; this one decides nothing any more.
            self.is_deciding = False
            self._claimed_at = float("inf")
            self._counts["fenced"] += 1
            return []
        if event.epoch < self.book.epoch or self.is_deciding:
            return []
        return self._begin(now)

    def _begin(self, now: float) -> list[Output]:
        self.is_deciding = True
        self._planner = ReadyPlanner(self._limits.ready_target, self.book.epoch)
        self.book.end_catch_up()
        live = list(self.book.live.values())
        self.fleet.begin((s.node_id for s in live), (s.gateway_id for s in live), now)
        for session in live:
            # An earlier scheduler may have sent it; the leases will tell.
            session.started_at = now
        out: list[Output] = []
        for task in list(self.book.tasks.values()):
            out += self._settle(task, now)
        return out

    # -- records ----------------------------------------------------------------------------

    def _on_task(self, record: LogRecord, event: RolloutTask, now: float) -> list[Output]:
        if self.is_deciding:
            if self.finished.is_fixed(event.task_id):
                self._counts["duplicate_tasks"] += 1
                return []
            if len(self.book.tasks) >= self._limits.max_open_tasks and event.task_id not in self.book.tasks:
                self._counts["refused_tasks"] += 1
                return [DeadLettered(record, "too_many_open_tasks", f"limit {self._limits.max_open_tasks}")]
        task = self.book.add_task(event)
        if task is None:
            self._counts["duplicate_tasks"] += 1
            return []
        self._keys.open(event.task_id, record)
        # Its sessions are behind this point; while catching up they may have been read already.
        positions = self._positions if self.is_deciding else self._starts
        for partition, offset in positions.items():
            if partition.topic == SESSIONS.suffix:
                self._keys.hold(event.task_id, partition, offset)
        return self._settle(task, now)

    def _on_session(self, record: LogRecord, event: LifecycleEvent, now: float) -> list[Output]:
        try:
            task = self.book.on_session(event, now)
        except IllegalTransitionError as error:
            self._counts["illegal_transitions"] += 1
            return [DeadLettered(record, "illegal_transition", str(error))]
        except ValueError as error:
            return [DeadLettered(record, "invalid", str(error))]
        if task is None:
            if self.is_deciding:
                self._counts["records_of_closed_tasks"] += 1
            return []
        out: list[Output] = []
        if self.is_deciding and isinstance(event, SessionRequested):
            session = self.book.live.get(event.session_id)
            if session is not None and session.started_at is None:
                out += self._start(session, task, now)
        return out + self._settle(task, now)

    def _on_node(self, heartbeat: NodeHeartbeat, now: float) -> list[Output]:
        node = self.fleet.on_node(heartbeat, now, is_fresh=self.is_deciding)
        if not self.is_deciding:
            return []
        unwanted = {lease for lease in heartbeat.leases if lease not in self.book.live}
        node.unwanted = {lease: node.unwanted.get(lease, now) for lease in unwanted}
        for lease in heartbeat.leases:
            session = self.book.live.get(lease)
            if session is not None:
                session.unleased_since = None
        return []

    def _settle(self, task: Task | None, now: float) -> list[Output]:
        if task is None or not self.is_deciding:
            return []
        out: list[Output] = list(self.book.settle(task, now))
        if task.task_id not in self.book.tasks:
            self._keys.close(task.task_id)
        return out

    # -- time -------------------------------------------------------------------------------

    def _check(self, session: Session, now: float) -> list[Output]:
        """One unfinished session against the clocks of its node and gateway."""
        if session.state is SessionState.NEW:
            return list(self.book.retry_request(session, now))
        if self.fleet.is_node_lost(session.node_id, now):
            self._counts["node_lost"] += 1
            return list(self.book.lose(session, f"node {session.node_id} is lost", now))
        if self.fleet.is_gateway_lost(session.gateway_id, now):
            reason = f"gateway {session.gateway_id} is lost"
            return [*self.book.lose(session, reason, now), *self._cancel_once(session, reason, now)]
        node = self.fleet.nodes[session.node_id]
        if node.heartbeat is None or not node.is_confirmed or session.session_id in node.heartbeat.leases:
            session.unleased_since = None
            return []
        if session.unleased_since is None:
            session.unleased_since = now
        patience = max(self._limits.node_timeout, 2 * self._limits.resend_after)
        if now - session.unleased_since > patience:
            return list(self.book.lose(session, f"node {session.node_id} does not hold the session", now))
        task = self.book.tasks.get(session.group_id)
        is_unstarted = session.state is SessionState.REQUESTED and (
            session.started_at is None or now - session.started_at >= self._limits.resend_after
        )
        return self._start(session, task, now) if task is not None and is_unstarted else []

    def _start(self, session: Session, task: Task, now: float) -> list[Output]:
        gateway = self.fleet.gateways.get(session.gateway_id)
        if gateway is None or gateway.heartbeat is None:
            return []
        if session.started_at is not None:
            self._counts["starts_resent"] += 1
        return list(self.book.start(session, task, gateway.heartbeat.url, now))

    def _cancel_once(self, session: Session, reason: str, now: float) -> Sequence[Output]:
        if session.cancelled_at is not None:
            return []
        session.cancelled_at = now
        return [cancel_command(session, reason)]

    def _cancel_unwanted(self, node: NodePresence, now: float) -> list[Output]:
        """Leases that no open task knows: the node was given up and came back."""
        out: list[Output] = []
        for lease, since in node.unwanted.items():
            if now - since >= self._limits.resend_after:
                node.unwanted[lease] = now + self._limits.retry_after
                self._counts["unwanted_leases"] += 1
                command = CancelSession(node_id=node.node_id, session_id=lease, reason="given up earlier")
                out.append(Emit(command))
        return out

    # -- planning ---------------------------------------------------------------------------

    def _plan(self, now: float) -> list[Output]:
        out: list[Output] = []
        nodes = self.fleet.live_nodes(now)
        gateways = self.fleet.ready_gateways(now)
        num_live = Counter(session.node_id for session in self.book.live.values())
        if gateways:
            num_open = Counter(session.gateway_id for session in self.book.live.values())
            warm = {(n.node_id, digest): count for n in nodes for digest, count in n.ready_digests.items()}
            while (waiting := self.book.first_waiting()) is not None:
                task, member = waiting
                node = best_node(nodes, num_live, warm, task.runtime_digest)
                if node is None:
                    break
                gateway = min(gateways, key=lambda one: (num_open[one.gateway_id], one.gateway_id))
                self.book.take_waiting()
                out.append(self.book.place(task, member, node.node_id, gateway.gateway_id, now))
                num_live[node.node_id] += 1
                num_open[gateway.gateway_id] += 1
                key = (node.node_id, task.runtime_digest)
                warm[key] = warm.get(key, 0) - 1
            free = sum(max(free_slots(node, num_live[node.node_id]), 0) for node in nodes)
            out += self._open_groups(free, now)
        is_complete = self.fleet.is_complete(now)
        commands = self._planner.plan(nodes, self._demands(), may_raise=is_complete)
        return [*out, *map(Emit, commands)]

    def _open_groups(self, free: int, now: float) -> list[Output]:
        """Open groups only as far as members can be placed: a group's deadline runs from then."""
        free -= self.book.num_waiting + self.book.num_opening_members
        out: list[Output] = []
        for task in self.book.unopened():
            if free <= 0:
                break
            free -= task.spec.num_samples
            out += self.book.open_group(task, now)
        return out

    def _demands(self) -> list[Demand]:
        """Digests of the earliest tasks, as far as the READY buffer reaches."""
        demands: dict[str, Demand] = {}
        seen = 0
        for task in self.book.tasks.values():
            if seen >= self._limits.ready_target:
                break
            if task.is_stopped:
                continue
            waiting = sum(1 for member in task.members if member.is_queued or task.opened_at is None)
            seen += waiting
            earlier = demands.get(task.runtime_digest)
            num_waiting = waiting + (earlier.num_waiting if earlier else 0)
            demands[task.runtime_digest] = Demand(task.runtime_digest, task.spec, num_waiting)
        return list(demands.values())


def _seconds(text: str | None, default: float) -> float:
    try:
        return float(text) if text is not None else default
    except ValueError:
        return default
