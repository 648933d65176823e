"""The scheduler's decisions, one behaviour a test."""

import dataclasses

from schemas.group_events import GroupMembersFixed, GroupOpened
from schemas.nodes import CancelSession, PrewarmRuntime, SchedulerStarted
from schemas.sessions import Outcome, SessionRequested
from tests.unit.rollout.scheduler_world import LIMITS, World, request, rounds, started


def test_a_task_becomes_sessions_and_a_fixed_group() -> None:
    world = World()
    world.boot()
    world.submit("t", request(4))
    rounds(world, 6)
    fixed = world.fixed()["t"]
    assert [member.session_id for member in fixed.members] == [f"t/{n}/0/1" for n in range(4)]
    assert {member.outcome for member in fixed.members} == {Outcome.COMPLETED}
    assert fixed.reason == "all_ended"
    assert all(member.has_trajectory for member in fixed.members)
    assert len(world.of(GroupOpened)) == 1
    assert world.core is not None
    assert not world.core.book.tasks
    assert not world.core.book.live


def test_nothing_is_decided_before_the_epoch_was_read_back() -> None:
    world = World()
    world.submit("t", request())
    world.beat()
    world.boot()
    for partition in world.log:
        while world.positions[partition] < world.ends[partition]:
            world.read(partition)
    assert [type(event) for event in world.written][-1] is SchedulerStarted
    assert not world.of(GroupOpened, SessionRequested)
    world.beat()
    world.drain()
    assert world.of(SessionRequested)


def test_epochs_count_up_and_mark_session_ids() -> None:
    world = World()
    world.boot()
    world.round()
    world.crash()
    world.boot()
    world.submit("t", request(1))
    rounds(world, 4)
    assert [event.epoch for event in world.of(SchedulerStarted)] == [1, 2]  # type: ignore[attr-defined]
    assert started(world)[0].session_id == "t/0/0/2"


def test_a_later_scheduler_silences_this_one() -> None:
    world = World()
    world.boot()
    world.round()
    world.write(SchedulerStarted(epoch=9))
    world.drain()
    world.submit("t", request())
    rounds(world, 3)
    assert world.core is not None
    assert not world.core.is_deciding
    assert not world.of(GroupOpened)


def test_a_second_submission_is_ignored_even_after_a_restart() -> None:
    world = World()
    world.boot()
    world.submit("t", request(1))
    world.submit("t", request(1))
    rounds(world, 4)
    world.crash()
    world.boot()
    world.submit("t", request(3))
    rounds(world, 4)
    assert len(started(world)) == 1
    assert len(world.of(GroupOpened)) == 1


def test_no_gateway_no_placement() -> None:
    world = World()
    world.gateways = set()
    world.boot()
    world.submit("t", request(1))
    rounds(world, 3)
    assert not world.of(GroupOpened, SessionRequested)
    world.gateways = {"g0"}
    rounds(world, 4)
    assert world.fixed()["t"].reason == "all_ended"


def test_the_group_deadline_fixes_what_there_is() -> None:
    world = World()
    world.boot()
    world.submit("t", request(2, group_seconds=20))
    rounds(world, 3, finish=False)
    world.finish(world.nodes["n0"], "t/0/0/1")
    rounds(world, 25, finish=False)
    fixed = world.fixed()["t"]
    assert fixed.reason == "deadline"
    assert [member.outcome for member in fixed.members] == [Outcome.COMPLETED, Outcome.CANCELLED]
    assert {event.session_id for event in world.of(CancelSession)} == {"t/1/0/1"}  # type: ignore[attr-defined]
    rounds(world, 2)
    assert world.core is not None
    assert not world.core.book.tasks


def test_the_deadline_survives_a_restart() -> None:
    world = World()
    world.boot()
    world.submit("t", request(1, group_seconds=20))
    rounds(world, 15, finish=False)
    world.crash()
    world.boot()
    rounds(world, 7, finish=False)
    assert world.fixed()["t"].reason == "deadline"


def test_waiting_for_a_free_node_does_not_use_up_the_deadline() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("first", request(2, group_seconds=1e6))
    world.submit("second", request(1, group_seconds=20))
    rounds(world, 60, finish=False)
    assert [event.group_id for event in world.of(GroupOpened)] == ["first"]  # type: ignore[attr-defined]
    rounds(world, 4)
    assert world.fixed()["second"].reason == "all_ended"


def test_cancelling_stops_sessions_and_fixes_the_group() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(4))
    rounds(world, 3, finish=False)
    world.cancel("t")
    rounds(world, 3, finish=False)
    fixed = world.fixed()["t"]
    assert fixed.reason == "cancelled"
    assert {member.outcome for member in fixed.members} == {Outcome.CANCELLED}
    assert [member.has_trajectory for member in fixed.members] == [True, True, False, False]
    assert len(started(world)) == 2


def test_cancelling_a_task_that_waits_closes_it_without_a_session() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("busy", request(2))
    rounds(world, 3, finish=False)
    world.submit("t", request(1))
    rounds(world, 3, finish=False)
    world.cancel("t")
    rounds(world, 3, finish=False)
    assert world.fixed()["t"].reason == "cancelled"
    assert {event.group_id for event in started(world)} == {"busy"}


def test_earlier_tasks_are_served_first() -> None:
    world = World(nodes=["n0"])
    world.boot()
    for name in ("d", "c", "b"):  # one partition after another would give another order
        world.submit(name, request(2))
        world.drain()
    rounds(world, 10)
    assert [event.group_id for event in started(world)] == ["d", "d", "c", "c", "b", "b"]


def test_a_draining_node_gets_nothing() -> None:
    world = World()
    world.nodes["n0"].draining = True
    world.boot()
    world.submit("t", request(4))
    rounds(world, 6)
    assert {event.node_id for event in started(world)} == {"n1"}
    assert {event.node_id for event in world.of(PrewarmRuntime)} == {"n1"}  # type: ignore[attr-defined]


def test_too_many_tasks_are_refused_by_name() -> None:
    world = World(dataclasses.replace(LIMITS, max_open_tasks=1), nodes=["n0"])
    world.boot()
    world.round()
    world.submit("a", request(1))
    world.submit("b", request(1))
    rounds(world, 3)
    assert [letter.reason for letter in world.dead_letters] == ["too_many_open_tasks"]


def test_the_ready_buffer_reaches_its_target_and_stays() -> None:
    world = World()
    world.boot()
    world.submit("t", request(4))
    rounds(world, 6, finish=False)
    assert world.idle_runtimes == LIMITS.ready_target
    sent = len(world.of(PrewarmRuntime))
    rounds(world, 5, finish=False)
    assert len(world.of(PrewarmRuntime)) == sent, "it converges"


def test_the_ready_buffer_follows_the_runtimes_in_sight() -> None:
    world = World()
    world.boot()
    world.submit("t", request(2, runtime="a"))
    rounds(world, 6)
    world.submit("u", request(4, runtime="b"))
    for _ in range(8):
        world.round(finish=False)
        assert sum(sum(node.idle.values()) for node in world.nodes.values()) <= LIMITS.ready_target
    kinds = {digest for node in world.nodes.values() for digest, idle in node.idle.items() if idle}
    assert len(kinds) == 1, "runtimes that no open task needs are given up"
    assert world.idle_runtimes == LIMITS.ready_target


def test_a_closed_task_leaves_memory_and_commits_pass_it() -> None:
    world = World()
    world.boot()
    for number in range(40):
        world.submit(f"t{number}", request(2))
        rounds(world, 3)
    rounds(world, 5)
    assert world.core is not None
    assert not world.core.book.tasks
    assert not world.core.book._sessions
    for partition, records in world.log.items():
        if partition.topic in ("tasks.v1", "sessions.v1"):
            assert world.committed[partition] == len(records)


def test_the_first_members_fixed_counts() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(1))
    rounds(world, 5)
    first = world.fixed()["t"]
    world.write(GroupMembersFixed(group_id="t", members=()))
    rounds(world, 2)
    assert world.core is not None
    finished = world.core.finished.get("t")
    assert finished is not None
    assert finished.fixed == first
