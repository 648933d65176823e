"""A log, nodes and a clock in memory, to drive SchedulerCore as its shell does.

The world keeps the promises of the real parts and no more: records of one partition come in
order, partitions in any interleaving; outputs are written in order and a crash may cut them
anywhere; commits may be old; a node handles its commands in order, and a restarted node reports
the sessions that it lost.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from polar.core.scheduling import INPUTS, READ_FROM_BEGINNING, SchedulerCore
from polar.core.scheduling_state import SchedulingLimits
from polar.core.stage import DeadLettered, Emit, LogRecord, Output, Partition
from schemas.base import Event
from schemas.group_events import GroupMembersFixed, GroupOpened
from schemas.ids import parse_session_id
from schemas.nodes import (
    CancelSession,
    GatewayHeartbeat,
    NodeHeartbeat,
    PrewarmRuntime,
    StageCounts,
    StartSession,
)
from schemas.sessions import (
    Outcome,
    SessionFinished,
    SessionLost,
    SessionReady,
    SessionRequested,
    SessionStarted,
)
from schemas.tasks import HarnessSpec, RolloutTask, RuntimeSpec, TaskCancelled, TaskRequest, TimeoutSpec
from schemas.topics import NODE_COMMANDS, TOPIC_OF

PARTITIONS = 2
LIMITS = SchedulingLimits(
    ready_target=3,
    node_timeout=10,
    gateway_timeout=30,
    max_open_tasks=50,
    resend_after=5,
    retry_after=30,
)


def request(
    num_samples: int = 2, *, runtime: str = "a", max_attempts: int = 3, group_seconds: float = 1e6
) -> TaskRequest:
    return TaskRequest(
        harness=HarnessSpec(command="true"),
        num_samples=num_samples,
        runtime=RuntimeSpec(env={"KIND": runtime}),
        max_attempts=max_attempts,
        timeouts=TimeoutSpec(group_seconds=group_seconds),
    )


@dataclass
class FakeNode:
    """A node that keeps one idle runtime per level and finishes sessions when told."""

    node_id: str
    max_sessions: int = 2
    max_ready: int = 3
    incarnation: int = 1
    is_alive: bool = True
    next_command: int = 0
    sessions: dict[str, StartSession] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    levels: dict[str, int] = field(default_factory=dict)
    idle: dict[str, int] = field(default_factory=dict)
    last_command: str = ""
    draining: bool = False
    forgets: bool = False
    """Drops every StartSession (a crash between reading and noting it)."""


class World:
    def __init__(self, limits: SchedulingLimits = LIMITS, nodes: Iterable[str] = ("n0", "n1")) -> None:
        self.limits = limits
        self.now = 1000.0
        self.log: dict[Partition, list[tuple[str, Event, dict[str, str]]]] = {
            Partition(topic.suffix, number): []
            for topic in INPUTS
            for number in range(1 if topic.partitions == "one" else PARTITIONS)
        }
        self.written: list[Event] = []
        """Everything on the log in order of writing, all topics."""
        self.committed: dict[Partition, int] = {}
        self.commands: dict[str, list[Event]] = defaultdict(list)
        self.nodes = {name: FakeNode(name) for name in nodes}
        self.gateways = {"g0"}
        self.dead_letters: list[DeadLettered] = []
        self.heartbeats = 0
        self.core: SchedulerCore | None = None
        self.positions: dict[Partition, int] = {}
        self.ends: dict[Partition, int] = {}
        self.num_checked = 0
        self.opened: set[str] = set()
        self.placed: dict[str, str] = {}
        self.ended: set[str] = set()
        self.running: dict[tuple[str, int], set[str]] = defaultdict(set)

    # -- the log ------------------------------------------------------------------------------

    def write(self, event: Event, headers: dict[str, str] | None = None) -> None:
        topic = TOPIC_OF[type(event)]
        key = topic.key_of(event)
        self.written.append(event)
        if topic is NODE_COMMANDS:
            self.commands[key].append(event)
            return
        number = sum(key.encode()) % PARTITIONS if topic.partitions != "one" else 0
        partition = Partition(topic.suffix, number)
        if partition in self.log:
            self.log[partition].append((key, event, headers or {}))

    def of(self, *kinds: type[Event]) -> list[Event]:
        return [event for event in self.written if isinstance(event, kinds)]

    # -- the scheduler's shell ----------------------------------------------------------------

    def boot(self) -> None:
        self.core = SchedulerCore(self.limits)
        self.positions, self.ends = {}, {}
        from_start = {topic.suffix for topic in READ_FROM_BEGINNING}
        ends = {}
        for partition, records in self.log.items():
            first = 0 if partition.topic in from_start else self.committed.get(partition, 0)
            self.positions[partition], self.ends[partition] = first, len(records)
            ends[partition] = (first, len(records))
        self.core.on_assigned(ends)
        for partition, (first, end) in ends.items():
            if first >= end:
                self.publish(self.core.on_caught_up(partition, self.now))

    def crash(self) -> None:
        self.core = None

    def publish(self, outputs: list[Output], *, keep: int | None = None) -> None:
        """Write outputs; `keep` of them when the scheduler dies in the middle."""
        for output in outputs[: keep if keep is not None else len(outputs)]:
            if isinstance(output, Emit):
                self.write(output.event, dict(output.headers))
            else:
                self.dead_letters.append(output)
        if keep is not None:
            self.crash()

    def read(self, partition: Partition, *, crash_after: int | None = None) -> bool:
        """Process one record of a partition, if there is one."""
        if self.core is None or self.positions[partition] >= len(self.log[partition]):
            return False
        offset = self.positions[partition]
        key, event, headers = self.log[partition][offset]
        self.positions[partition] = offset + 1
        outputs = self.core.on_record(LogRecord(partition, offset, key, event, headers), self.now)
        self.publish(outputs, keep=crash_after)
        if self.core is not None and self.positions[partition] == self.ends[partition]:
            self.publish(self.core.on_caught_up(partition, self.now))
        return True

    def commit(self) -> None:
        if self.core is not None:
            for partition, offset in self.core.commit_offsets().items():
                assert offset >= self.committed.get(partition, 0), "commits never go back"
                self.committed[partition] = offset

    def tick(self) -> None:
        if self.core is not None:
            self.publish(self.core.on_tick(self.now))

    def drain(self) -> None:
        """Read everything there is, including what the scheduler writes meanwhile."""
        while self.core is not None and sum(self.read(partition) for partition in self.log):
            pass

    # -- nodes and gateways -------------------------------------------------------------------

    def beat(self, *only: str) -> None:
        """Heartbeats of everything alive, or of these."""
        for node in self.nodes.values():
            if node.is_alive and node.node_id in (only or self.nodes):
                self.heartbeats += 1
                self.write(
                    NodeHeartbeat(
                        node_id=node.node_id,
                        incarnation=str(node.incarnation),
                        seq=self.heartbeats,
                        max_sessions=node.max_sessions,
                        max_ready=node.max_ready,
                        counts=StageCounts(ready=sum(node.idle.values()), running=len(node.running)),
                        ready_digests=dict(node.idle),
                        leases=tuple(node.sessions),
                        last_command=node.last_command,
                        draining=node.draining,
                    )
                )
        for gateway_id in sorted(self.gateways.intersection(only) if only else self.gateways):
            self.heartbeats += 1
            self.write(
                GatewayHeartbeat(
                    gateway_id=gateway_id, incarnation="1", seq=self.heartbeats, url=f"http://{gateway_id}"
                )
            )

    def handle_command(self, node: FakeNode) -> bool:
        """The node handles its next command, if it is alive and there is one."""
        if not node.is_alive or node.next_command >= len(self.commands[node.node_id]):
            return False
        command = self.commands[node.node_id][node.next_command]
        node.next_command += 1
        match command:
            case PrewarmRuntime():
                node.levels[command.runtime_digest] = command.count
                node.last_command = command.command_id
                idle = node.idle.get(command.runtime_digest, 0)
                node.idle[command.runtime_digest] = min(idle, command.count)
            case StartSession():
                if command.session_id not in node.seen and not node.forgets:
                    node.seen.add(command.session_id)
                    node.sessions[command.session_id] = command
                    idle = node.idle.get(command.runtime_digest, 0)
                    node.idle[command.runtime_digest] = max(idle - 1, 0)
            case CancelSession():
                self.finish(node, command.session_id, Outcome.CANCELLED)
        return True

    def refill(self, node: FakeNode) -> None:
        """The node makes the runtimes that its levels ask for."""
        for digest, level in node.levels.items():
            node.idle[digest] = max(level, node.idle.get(digest, 0))

    def start(self, node: FakeNode, session_id: str) -> None:
        if node.is_alive and session_id in node.sessions and session_id not in node.running:
            ids = {"session_id": session_id, "group_id": parse_session_id(session_id)[0]}
            self.write(SessionReady(node_id=node.node_id, warm=False, **ids))
            self.write(SessionStarted(node_id=node.node_id, **ids))
            node.running.add(session_id)

    def finish(
        self, node: FakeNode, session_id: str, outcome: Outcome = Outcome.COMPLETED, *, sealed: bool = True
    ) -> None:
        if node.is_alive and node.sessions.pop(session_id, None) is not None:
            node.running.discard(session_id)
            self.write(
                SessionFinished(
                    session_id=session_id,
                    group_id=parse_session_id(session_id)[0],
                    node_id=node.node_id,
                    outcome=outcome,
                    reason=outcome.value,
                    sealed=sealed,
                )
            )

    def kill_node(self, node: FakeNode) -> None:
        node.is_alive = False

    def restart_node(self, node: FakeNode) -> None:
        """It comes back under a new incarnation and reports what it held."""
        node.is_alive = True
        node.incarnation += 1
        node.levels, node.idle, node.last_command = {}, {}, ""
        for session_id in list(node.sessions):
            self.finish(node, session_id, Outcome.INFRA_ERROR)

    def submit(self, task_id: str, spec: TaskRequest) -> None:
        self.write(RolloutTask(task_id=task_id, spec=spec))

    def cancel(self, task_id: str) -> None:
        self.write(TaskCancelled(task_id=task_id, reason="test"))

    # -- time ---------------------------------------------------------------------------------

    def round(self, *, seconds: float = 1.0, finish: bool = True) -> None:
        """A second of a healthy system: everything is read, nodes do their work."""
        self.now += seconds
        self.beat()
        self.drain()
        self.tick()
        self.drain()
        for node in self.nodes.values():
            while self.handle_command(node):
                pass
            self.refill(node)
            for session_id in list(node.sessions):
                self.start(node, session_id)
                if finish:
                    self.finish(node, session_id)
        self.drain()
        self.commit()

    # -- what must hold -----------------------------------------------------------------------

    def check(self) -> None:
        """Laws over the whole log, told as far as it was not checked yet."""
        for event in self.written[self.num_checked :]:
            self.num_checked += 1
            match event:
                case GroupOpened():
                    self.opened.add(event.group_id)
                case SessionRequested():
                    assert event.group_id in self.opened, "the group is opened before its sessions"
                    assert self.placed.setdefault(event.session_id, event.node_id) == event.node_id
                case StartSession():
                    assert event.session_id in self.placed, "requested before started"
                    assert self.placed[event.session_id] == event.node_id, "started where it was placed"
                    member = parse_session_id(event.session_id)[:2]
                    if event.session_id not in self.ended:
                        self.running[member].add(event.session_id)
                    assert len(self.running[member]) <= 1, f"placed twice: {self.running[member]}"
                case SessionFinished() | SessionLost():
                    self.ended.add(event.session_id)
                    self.running[parse_session_id(event.session_id)[:2]].discard(event.session_id)
                case _:
                    pass

    @property
    def idle_runtimes(self) -> int:
        return sum(sum(node.idle.values()) for node in self.nodes.values() if node.is_alive)

    def fixed(self) -> dict[str, GroupMembersFixed]:
        first: dict[str, GroupMembersFixed] = {}
        for event in self.of(GroupMembersFixed):
            assert isinstance(event, GroupMembersFixed)
            first.setdefault(event.group_id, event)
        return first


def started(world: World) -> list[StartSession]:
    """StartSession commands in order."""
    return [event for event in world.of(StartSession) if isinstance(event, StartSession)]


def rounds(world: World, count: int, *, finish: bool = True, seconds: float = 1.0) -> None:
    """So many healthy seconds, with the laws checked after each."""
    for _ in range(count):
        world.round(finish=finish, seconds=seconds)
        world.check()
