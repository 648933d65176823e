"""What the scheduler does about nodes, gateways and sessions that fail, one behaviour a test."""

import pytest

from schemas.calls import SessionAbandoned
from schemas.nodes import CancelSession
from schemas.sessions import Outcome, SessionLost, SessionReady, SessionRequested
from tests.unit.rollout.scheduler_world import World, request, rounds, started


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


def test_an_illegal_transition_is_listed_and_changes_nothing() -> None:
    world = World(nodes=["n0"])
    world.boot()
    world.submit("t", request(1))
    rounds(world, 3, finish=False)
    world.write(SessionReady(session_id="t/0/0/1", group_id="t", node_id="n0", warm=True))
    rounds(world, 3)
    assert [letter.reason for letter in world.dead_letters] == ["illegal_transition"]
    assert world.fixed()["t"].members[0].outcome is Outcome.COMPLETED


def test_an_outage_of_the_log_loses_nobody() -> None:
    world = World()
    world.boot()
    world.submit("t", request(2))
    rounds(world, 3, finish=False)
    for _ in range(100):
        world.now += 1
        world.tick()
    world.gateways, gateways = set(), world.gateways
    world.beat()  # the node is heard first, the gateway a moment later
    world.drain()
    world.tick()
    world.gateways = gateways
    rounds(world, 4)
    assert not world.of(SessionLost)
    assert world.fixed()["t"].reason == "all_ended"


def test_a_scheduler_that_stood_still_loses_nobody() -> None:
    world = World()
    world.boot()
    world.submit("t", request(2))
    rounds(world, 3, finish=False)
    for _ in range(60):
        world.now += 1
        world.beat()
    world.tick()
    rounds(world, 4)
    assert not world.of(SessionLost)
