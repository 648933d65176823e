"""Laws of the READY buffer: never above the target, at the target when nothing else changes."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from polar.core.ready_planner import Demand, ReadyPlanner
from schemas.nodes import NodeHeartbeat, PrewarmRuntime, StageCounts
from tests.unit.rollout.scheduler_world import request

TARGET = 4
NAMES = st.sampled_from(["n0", "n1", "n2"])
TASK = request()
DEMANDS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=3, unique_by=lambda demand: demand[0]
)


@dataclass
class PlannedNode:
    max_ready: int
    incarnation: int = 1
    levels: dict[str, int] = field(default_factory=dict)
    idle: dict[str, int] = field(default_factory=dict)
    inbox: list[PrewarmRuntime] = field(default_factory=list)
    last_command: str = ""


class ReadyMachine(RuleBasedStateMachine):
    """Nodes handle commands, warm runtimes and beat at any time; schedulers come and go."""

    @initialize(rooms=st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(1, 5)))
    def start(self, rooms: tuple[int, int, int]) -> None:
        self.nodes = {f"n{number}": PlannedNode(room) for number, room in enumerate(rooms)}
        self.heard: dict[str, NodeHeartbeat] = {}
        self.epoch = 1
        self.planner = ReadyPlanner(TARGET, 1)
        self.demands = [Demand("a", TASK, 8)]

    def plan(self) -> None:
        heard = [self.heard[name] for name in sorted(self.heard)]
        is_complete = len(heard) == len(self.nodes)
        for command in self.planner.plan(heard, self.demands, may_raise=is_complete):
            self.nodes[command.node_id].inbox.append(command)

    @rule(name=NAMES)
    def beat(self, name: str) -> None:
        node = self.nodes[name]
        self.heard[name] = NodeHeartbeat(
            node_id=name,
            incarnation=str(node.incarnation),
            seq=1,
            max_sessions=4,
            max_ready=node.max_ready,
            counts=StageCounts(),
            ready_digests={digest: count for digest, count in node.idle.items() if count},
            last_command=node.last_command,
        )
        self.plan()

    @rule(name=NAMES)
    def handle(self, name: str) -> None:
        node = self.nodes[name]
        if node.inbox:
            command = node.inbox.pop(0)
            node.levels[command.runtime_digest] = command.count
            node.last_command = command.command_id
            held = node.idle.get(command.runtime_digest, 0)
            node.idle[command.runtime_digest] = min(held, command.count)

    @rule(name=NAMES)
    def warm(self, name: str) -> None:
        node = self.nodes[name]
        for digest, level in node.levels.items():
            room = node.max_ready - sum(node.idle.values())
            missing = level - node.idle.get(digest, 0)
            node.idle[digest] = node.idle.get(digest, 0) + max(min(missing, room), 0)

    @rule(name=NAMES, digest=st.sampled_from("abc"))
    def a_session_takes_one(self, name: str, digest: str) -> None:
        idle = self.nodes[name].idle
        idle[digest] = max(idle.get(digest, 0) - 1, 0)

    @rule(name=NAMES)
    def restart_node(self, name: str) -> None:
        node = self.nodes[name]
        node.incarnation += 1
        node.levels, node.idle, node.last_command = {}, {}, ""

    @rule()
    def restart_scheduler(self) -> None:
        self.epoch += 1
        self.heard.clear()
        self.planner = ReadyPlanner(TARGET, self.epoch)

    @rule(
        demands=st.lists(
            st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=3, unique_by=lambda d: d[0]
        )
    )
    def other_tasks(self, demands: list[tuple[str, int]]) -> None:
        self.demands = [Demand(digest, TASK, waiting) for digest, waiting in demands]
        self.plan()

    @invariant()
    def never_above_the_target(self) -> None:
        for digest in "abc":
            assert sum(node.idle.get(digest, 0) for node in self.nodes.values()) <= TARGET, digest

    def teardown(self) -> None:
        self.demands = self.demands or [Demand("a", TASK, 1)]
        for _ in range(8):
            for name in self.nodes:
                self.beat(name)
                while self.nodes[name].inbox:
                    self.handle(name)
                self.warm(name)
                self.never_above_the_target()
        in_sight = {demand.digest for demand in self.demands}
        held = {digest: sum(node.idle.get(digest, 0) for node in self.nodes.values()) for digest in "abc"}
        room = sum(node.max_ready for node in self.nodes.values())
        assert sum(held[digest] for digest in in_sight) == min(TARGET, room)
        assert not any(held[digest] for digest in set("abc") - in_sight)
        for name in self.nodes:
            self.beat(name)
        assert not any(node.inbox for node in self.nodes.values()), "it converges"


TestReadyLaws = ReadyMachine.TestCase
TestReadyLaws.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
