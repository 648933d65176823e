"""A scheduler that starts anew, with the topics read in any order."""

import pytest

from polar.core.ready_planner import Demand, ReadyPlanner
from schemas.group_events import GroupMembersFixed
from schemas.nodes import NodeHeartbeat, PrewarmRuntime, StageCounts
from schemas.sessions import Outcome
from tests.unit.rollout.scheduler_world import LIMITS, World, request, rounds, started

TASK = request()


def read_first(world: World, *topics: str, backwards: bool = False) -> None:
    """Read these topics to their end, one partition after the other, and nothing else."""
    for topic in topics:
        for partition in sorted(world.log, reverse=backwards):
            if partition.topic == topic:
                while world.read(partition):
                    pass


@pytest.mark.parametrize("is_decided", [False, True])
def test_sessions_that_are_read_before_their_task_survive_another_crash(is_decided: bool) -> None:
    world = World()
    world.boot()
    world.submit("t", request(2))
    rounds(world, 3, finish=False)
    world.crash()
    world.boot()
    read_first(world, "sessions.v1")
    if is_decided:
        world.beat()
        world.drain()
    world.commit()
    world.crash()
    world.boot()
    rounds(world, 12)
    assert {event.session_id for event in started(world)} == {"t/0/0/1", "t/1/0/1"}
    assert world.fixed()["t"].reason == "all_ended"


@pytest.mark.parametrize("backwards", [False, True])
def test_attempts_are_told_apart_in_any_order_of_partitions(backwards: bool) -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(1))
    rounds(world, 3, finish=False)
    world.finish(world.nodes["n0"], "t/0/0/1", Outcome.INFRA_ERROR)
    rounds(world, 2, finish=False)
    world.crash()
    world.boot()
    read_first(world, "sessions.v1", backwards=backwards)
    rounds(world, 8)
    assert [member.session_id for member in world.fixed()["t"].members] == ["t/0/1/1"]
    assert {event.session_id for event in started(world)} == {"t/0/0/1", "t/0/1/1"}


def test_a_closed_task_that_is_read_again_stays_closed() -> None:
    world = World()
    world.boot()
    world.submit("t", request(2))
    for _ in range(5):
        world.round()
    world.committed.clear()
    world.crash()
    world.boot()
    read_first(world, "group-events.v1", "sessions.v1", "tasks.v1")
    rounds(world, 3)
    assert len(world.of(GroupMembersFixed)) == 1
    assert world.core is not None
    assert not world.core.book.tasks
    assert not world.core.book._sessions


def test_a_start_on_its_way_is_not_sent_again_at_once() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.round()
    world.submit("t", request(1))
    world.drain()
    assert len(started(world)) == 1
    world.crash()
    world.boot()
    for _ in range(3):
        world.now += 1
        world.beat()
        world.drain()
        world.tick()
    assert len(started(world)) == 1
    rounds(world, 3)
    assert world.fixed()["t"].reason == "all_ended"


def test_a_decision_that_is_not_read_back_is_written_again_only_in_time() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(1))
    rounds(world, 2, finish=False)
    world.finish(world.nodes["n0"], "t/0/0/1")
    read_first(world, "sessions.v1")
    for _ in range(3):
        world.now += 1
        world.tick()
    assert len(world.of(GroupMembersFixed)) == 1
    world.now += LIMITS.retry_after
    world.tick()
    assert len(world.of(GroupMembersFixed)) == 2


def test_the_ready_buffer_is_not_filled_twice_across_a_restart() -> None:
    """The first scheduler's commands are on their way to a node that the second has not heard."""
    world = World()
    world.boot()
    world.beat("n0", "g0")
    world.submit("t", request(40))
    world.drain()
    world.beat("n0", "g0")
    world.drain()
    world.handle_command(world.nodes["n0"])
    world.beat("n0", "g0")
    world.drain()
    sent = [event.count for event in world.of(PrewarmRuntime) if isinstance(event, PrewarmRuntime)]
    assert sent == [0, LIMITS.ready_target]
    world.crash()
    world.boot()
    for _ in range(6):
        world.now += 1
        world.beat("n1", "g0")
        world.drain()
        while world.handle_command(world.nodes["n1"]):
            pass
    for node in world.nodes.values():
        while world.handle_command(node):
            pass
        world.refill(node)
    assert world.idle_runtimes <= LIMITS.ready_target
    rounds(world, 4, finish=False)
    assert world.idle_runtimes == LIMITS.ready_target


def heartbeat(node_id: str, *, last_command: str = "", held: int = 0) -> NodeHeartbeat:
    return NodeHeartbeat(
        node_id=node_id,
        incarnation="1",
        seq=1,
        max_sessions=4,
        max_ready=8,
        counts=StageCounts(),
        ready_digests={"a": held} if held else {},
        last_command=last_command,
    )


def test_nothing_is_raised_before_every_node_has_answered_this_epoch() -> None:
    """n0 may still have a command of an earlier scheduler before it."""
    planner = ReadyPlanner(4, epoch=2)
    demands = [Demand("a", TASK, 8)]
    nodes = [heartbeat("n0", last_command="1/9"), heartbeat("n1")]
    first = planner.plan(nodes, demands)
    assert [(command.node_id, command.count) for command in first] == [("n0", 0), ("n1", 0)]
    nodes[1] = heartbeat("n1", last_command=first[1].command_id)
    assert not planner.plan(nodes, demands)
    nodes[0] = heartbeat("n0", last_command=first[0].command_id)
    assert sum(command.count for command in planner.plan(nodes, demands)) == 4


def test_a_level_counts_until_the_node_has_seen_the_lower_one() -> None:
    planner = ReadyPlanner(4, epoch=1)
    demands = [Demand("a", TASK, 8)]
    (sync,) = planner.plan([heartbeat("n0")], demands)
    (raised,) = planner.plan([heartbeat("n0", last_command=sync.command_id)], demands)
    assert raised.count == 4
    lowering = planner.plan(
        [heartbeat("n0", last_command=sync.command_id)], [Demand("a", TASK, 1), Demand("b", TASK, 9)]
    )
    assert [(command.runtime_digest, command.count) for command in lowering] == [("a", 1)]
    seen_both = heartbeat("n0", last_command=lowering[0].command_id)
    more = planner.plan([seen_both], [Demand("a", TASK, 1), Demand("b", TASK, 9)])
    assert [(command.runtime_digest, command.count) for command in more] == [("b", 3)]
