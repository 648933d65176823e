"""The scheduler's decisions, one behaviour a test."""

import dataclasses

import pytest

from schemas.calls import SessionAbandoned
from schemas.group_events import GroupMembersFixed, GroupOpened
from schemas.nodes import CancelSession, PrewarmRuntime, SchedulerStarted, StartSession
from schemas.sessions import Outcome, SessionLost, SessionReady, SessionRequested
from tests.unit.rollout.scheduler_world import LIMITS, World, request


def started(world: World) -> list[StartSession]:
    return [event for event in world.of(StartSession) if isinstance(event, StartSession)]


def rounds(world: World, count: int, *, finish: bool = True, seconds: float = 1.0) -> None:
    for _ in range(count):
        world.round(finish=finish, seconds=seconds)
        world.check()


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


def test_infra_errors_are_tried_again_and_listed() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(1, max_attempts=2))
    rounds(world, 3, finish=False)
    world.finish(world.nodes["n0"], "t/0/0/1", Outcome.INFRA_ERROR)
    rounds(world, 3)
    fixed = world.fixed()["t"]
    assert [member.session_id for member in fixed.members] == ["t/0/1/1"]
    assert fixed.members[0].outcome is Outcome.COMPLETED
    assert [(item.id, item.reason) for item in fixed.superseded] == [("t/0/0/1", "infra_error")]


def test_attempts_end() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(1, max_attempts=2))
    for attempt in range(2):
        rounds(world, 3, finish=False)
        world.finish(world.nodes["n0"], f"t/0/{attempt}/1", Outcome.INFRA_ERROR)
    rounds(world, 3)
    assert world.fixed()["t"].members[0].outcome is Outcome.INFRA_ERROR
    assert len(started(world)) == 2


@pytest.mark.parametrize("outcome", [Outcome.AGENT_ERROR, Outcome.TIMED_OUT])
def test_the_agents_own_failures_are_not_repeated(outcome: Outcome) -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(1))
    rounds(world, 3, finish=False)
    world.finish(world.nodes["n0"], "t/0/0/1", outcome)
    rounds(world, 3)
    assert world.fixed()["t"].members[0].outcome is outcome
    assert len(started(world)) == 1


def test_a_silent_node_loses_its_sessions_and_they_run_elsewhere() -> None:
    world = World()
    world.boot()
    world.submit("t", request(4))
    rounds(world, 3, finish=False)
    lost = set(world.nodes["n0"].sessions)
    assert lost
    world.kill_node(world.nodes["n0"])
    rounds(world, 15)
    rounds(world, 5)
    assert {event.session_id for event in world.of(SessionLost)} == lost  # type: ignore[attr-defined]
    assert {event.session_id for event in world.of(SessionAbandoned)} == lost  # type: ignore[attr-defined]
    fixed = world.fixed()["t"]
    assert {member.outcome for member in fixed.members} == {Outcome.COMPLETED}
    assert {item.id for item in fixed.superseded} == lost


def test_a_node_that_was_given_up_and_comes_back_stops_its_sessions() -> None:
    world = World()
    world.boot()
    world.submit("t", request(2))
    rounds(world, 3, finish=False)
    held = set(world.nodes["n0"].sessions)
    world.kill_node(world.nodes["n0"])
    rounds(world, 15)
    world.nodes["n0"].is_alive = True
    rounds(world, 8, finish=False)
    assert {event.session_id for event in world.of(CancelSession)} == held  # type: ignore[attr-defined]
    assert not world.nodes["n0"].sessions


def test_a_restarted_node_reports_its_dead_sessions() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(2))
    rounds(world, 3, finish=False)
    world.restart_node(world.nodes["n0"])
    rounds(world, 4)
    assert {member.session_id for member in world.fixed()["t"].members} == {"t/0/1/1", "t/1/1/1"}
    assert not world.of(SessionLost)


def test_a_start_that_the_node_missed_is_sent_again() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.nodes["n0"].forgets = True
    world.submit("t", request(1))
    rounds(world, 3)
    world.nodes["n0"].forgets = False
    rounds(world, 8)
    assert {event.session_id for event in started(world)} == {"t/0/0/1"}
    assert len(started(world)) > 1
    assert world.fixed()["t"].members[0].outcome is Outcome.COMPLETED


def test_a_crash_between_request_and_start_is_healed() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.round()
    world.submit("t", request(1))
    while not world.of(SessionRequested):
        for partition in world.log:
            world.read(partition)
    assert not started(world)
    world.crash()
    world.boot()
    rounds(world, 8)
    assert {event.session_id for event in started(world)} == {"t/0/0/1"}
    assert world.fixed()["t"].members[0].outcome is Outcome.COMPLETED


def test_a_session_that_its_node_forgot_is_lost_in_time() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(1))
    rounds(world, 3, finish=False)
    world.nodes["n0"].sessions.clear()
    world.nodes["n0"].running.clear()
    rounds(world, 20)
    assert [event.session_id for event in world.of(SessionLost)] == ["t/0/0/1"]  # type: ignore[attr-defined]
    assert world.fixed()["t"].members[0].session_id == "t/0/1/1"


def test_a_gateway_that_does_not_come_back_has_its_sessions_abandoned() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(1))
    rounds(world, 3, finish=False)
    world.gateways = {"g1"}
    rounds(world, 25, finish=False)
    assert not world.of(SessionLost), "a gateway may take its time to come back"
    rounds(world, 10, finish=False)
    assert [event.session_id for event in world.of(SessionAbandoned)] == ["t/0/0/1"]  # type: ignore[attr-defined]
    rounds(world, 3)
    assert started(world)[-1].gateway_id == "g1"
    assert world.fixed()["t"].members[0].outcome is Outcome.COMPLETED


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


def test_an_unsealed_session_is_abandoned() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(1, max_attempts=1))
    rounds(world, 3, finish=False)
    world.finish(world.nodes["n0"], "t/0/0/1", Outcome.INFRA_ERROR, sealed=False)
    rounds(world, 3)
    assert [event.session_id for event in world.of(SessionAbandoned)] == ["t/0/0/1"]  # type: ignore[attr-defined]


def test_a_member_that_never_reached_a_gateway_has_no_trajectory() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(1, max_attempts=1))
    while not world.nodes["n0"].sessions:
        world.now += 1
        world.beat()
        world.drain()
        world.tick()
        world.drain()
        while world.handle_command(world.nodes["n0"]):
            pass
    world.finish(world.nodes["n0"], "t/0/0/1", Outcome.INFRA_ERROR)
    rounds(world, 2)
    assert not world.of(SessionReady)
    assert not world.fixed()["t"].members[0].has_trajectory


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


def test_an_illegal_transition_is_listed_and_changes_nothing() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(1))
    rounds(world, 3, finish=False)
    world.write(SessionReady(session_id="t/0/0/1", group_id="t", node_id="n0", warm=True))
    rounds(world, 3)
    assert [letter.reason for letter in world.dead_letters] == ["illegal_transition"]
    assert world.fixed()["t"].members[0].outcome is Outcome.COMPLETED


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
