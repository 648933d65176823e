"""The order of a version change, its failures, and what a killed weight-sync leaves behind."""

import asyncio

import pytest

from polar.errors import EngineError, GatewayError
from polar.weightsync.engine_client import EngineDownError
from polar.weightsync.engine_sync import CanaryError
from tests.unit.weightsync.fake_world import BASE, FakeGateway, World, heartbeat, published

LOAD = [
    "/weight_checker",
    "/pause",
    "gw.test pending run:1",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "gw.test settled run:1",
    "/resume",
    "/weight_checker",
    "/v1/completions",
]


async def test_the_order_of_a_load() -> None:
    world = World()
    target = world.publish(published("run", 1, "A"))
    await world.new_sync().bring_to(target)
    assert world.calls == LOAD
    assert (world.weights, world.version, world.is_paused) == ("A", "run:1", False)
    (state,) = world.states
    assert (state.status, state.version, state.policy) == ("ready", target.version, "policy")
    assert state.canary_gap == pytest.approx(0, abs=1e-6)
    assert state.checksum
    assert state.paused_seconds >= state.load_seconds > 0


async def test_an_engine_in_order_is_left_alone() -> None:
    world = World()
    target = world.publish(published("run", 1, "A"))
    sync = world.new_sync()
    await sync.bring_to(target)
    world.calls.clear()
    await sync.bring_to(target)
    assert world.calls == []
    assert len(world.states) == 1


async def test_a_running_engine_of_the_right_version_is_only_checked() -> None:
    world = World()
    target = world.publish(published("run", 1, "A"))
    await world.new_sync().bring_to(target)
    world.calls.clear()
    await world.new_sync().bring_to(target)
    assert world.calls == ["/v1/completions", "/weight_checker"]
    assert [state.status for state in world.states] == ["ready", "ready"]


async def test_equal_weights_get_a_new_name_without_a_load() -> None:
    world = World()
    sync = world.new_sync()
    await sync.bring_to(world.publish(published("run", 1, "A")))
    world.calls.clear()
    await sync.bring_to(world.publish(published("run", 2, "A")))
    assert world.calls == [
        "gw.test pending run:2", "/update_weight_version", "gw.test settled run:2", "/v1/completions",
    ]  # fmt: skip
    assert world.version == "run:2"
    assert str(world.states[-1].version) == "run:2"


async def test_equal_weights_of_an_engine_left_paused_are_loaded_all_the_same() -> None:
    world = World()
    await world.new_sync().bring_to(world.publish(published("run", 1, "A")))
    # Killed behind the load of B and before its name.
    world.weights, world.is_paused = "B", True
    world.publish(published("run", 2, "B"))
    await world.new_sync().bring_to(world.publish(published("next", 1, "A")))
    assert (world.weights, world.version, world.is_paused) == ("A", "next:1", False)


async def test_an_engine_that_restarted_gets_the_newest_version_again() -> None:
    world = World()
    target = world.publish(published("run", 1, "A"))
    sync = world.new_sync()
    await sync.bring_to(target)
    world.restart_engine()
    for gateway in world.gateways.values():
        gateway.settled = "base:0"  # gateways ask an engine that was down
    world.calls.clear()
    await sync.bring_to(target)
    assert world.calls == LOAD
    assert world.weights == "A"


async def test_wrong_digest_keeps_the_old_weights_and_the_engine_running() -> None:
    world = World()
    sync = world.new_sync()
    await sync.bring_to(world.publish(published("run", 1, "A")))
    world.on_disk["/weights/B"] = "something else"
    world.calls.clear()
    with pytest.raises(EngineError, match=r"update_weights answers 500: digest differs"):
        await sync.bring_to(world.publish(published("run", 2, "B")))
    assert (world.weights, world.version, world.is_paused) == ("A", "run:1", False)
    assert world.calls[-3:] == ["/weight_checker", "gw.test settled run:1", "/resume"]
    # Repaired on disk: the next try succeeds.
    del world.on_disk["/weights/B"]
    await sync.bring_to(published("run", 2, "B"))
    assert (world.weights, world.version) == ("B", "run:2")


async def test_weights_in_doubt_keep_the_engine_paused_until_a_load_succeeds() -> None:
    world = World(fail={"/finish_weight_update": 1})
    sync = world.new_sync()
    target = world.publish(published("run", 1, "A"))
    with pytest.raises(EngineError):
        await sync.bring_to(target)
    assert world.is_paused  # A is loaded, but its name is still the old one
    await sync.bring_to(target)
    assert (world.weights, world.version, world.is_paused) == ("A", "run:1", False)


async def test_a_failed_canary_fences_the_engine_and_loads_again() -> None:
    world = World(corrupt=True)
    sync = world.new_sync()
    target = world.publish(published("run", 1, "A"))
    with pytest.raises(CanaryError, match="log-probs on the canary differ"):
        await sync.bring_to(target)
    assert world.is_paused
    assert world.calls[-2:] == ["/pause", "gw.test pending run:1"]  # gateways send their calls elsewhere
    await sync.report_failure("canary")
    assert world.states[-1].status == "failed"
    world.corrupt = False
    await sync.bring_to(target)
    assert not world.is_paused
    assert world.weights == "A"
    assert world.states[-1].status == "ready"


async def test_a_gateway_that_is_alive_and_fails_blocks_the_load() -> None:
    world = World()
    world.gateways["http://gw.test"].status = 503
    sync = world.new_sync()
    target = world.publish(published("run", 1, "A"))
    with pytest.raises(GatewayError, match=r"pending run:1 of engine engine-0 from http://gw.test"):
        await sync.bring_to(target)
    assert "/update_weights" not in world.calls
    assert (world.weights, world.is_paused) == (BASE, False)
    world.gateways["http://gw.test"].status = 200
    await sync.bring_to(target)
    assert world.weights == "A"


async def test_the_engine_waits_until_a_living_gateway_heard_that_it_settled() -> None:
    world = World()
    sync = world.new_sync()
    target = world.publish(published("run", 1, "A"))
    world.hang_after = "/finish_weight_update"
    task = asyncio.create_task(sync.bring_to(target))
    await world.hung.wait()
    task.cancel()
    world.hang_after = ""
    world.gateways["http://gw.test"].status = 500
    again = asyncio.create_task(world.new_sync().bring_to(target))
    with pytest.raises(GatewayError):
        await again
    assert world.is_paused
    world.gateways["http://gw.test"].status = 200
    await world.new_sync().bring_to(target)
    assert not world.is_paused


async def test_a_dead_gateway_is_skipped_and_one_with_heartbeats_is_not() -> None:
    world = World(gateways={"http://gone.test": FakeGateway(is_down=True), "http://gw.test": FakeGateway()})
    sync = world.new_sync()
    await sync.bring_to(world.publish(published("run", 1, "A")))
    assert world.gateways["http://gw.test"].settled == "run:1"

    world.told.hear(heartbeat("http://gone.test"))
    with pytest.raises(GatewayError, match=r"gone\.test"):
        await sync.bring_to(world.publish(published("run", 2, "B")))
    assert world.weights == "A"


async def test_gateways_known_by_heartbeat_alone_are_told() -> None:
    world = World()
    sync = world.new_sync(configured="")
    world.told.hear(heartbeat("http://gw.test"))
    await sync.bring_to(world.publish(published("run", 1, "A")))
    assert world.calls == LOAD


async def test_an_engine_that_is_down_is_said_to_be_down() -> None:
    world = World(is_down=True)
    sync = world.new_sync()
    with pytest.raises(EngineDownError, match=r"does not answer at http://engine\.test"):
        await sync.bring_to(world.publish(published("run", 1, "A")))
    await sync.report_failure("down")
    await sync.report_failure("down")
    assert [(state.status, state.reason) for state in world.states] == [("failed", "down")]


async def test_an_engine_that_dies_in_a_load_and_comes_back_is_not_in_doubt() -> None:
    world = World(die_at="/update_weights")
    sync = world.new_sync()
    target = world.publish(published("run", 1, "A"))
    with pytest.raises(EngineError, match="connection lost"):
        await sync.bring_to(target)
    world.restart_engine()
    world.gateways["http://gw.test"].status = 503
    with pytest.raises(GatewayError):
        await sync.bring_to(target)
    assert not world.is_paused  # it has its base weights, so it goes on with them
    world.gateways["http://gw.test"].status = 200
    await sync.bring_to(target)
    assert (world.weights, world.version, world.is_paused) == ("A", "run:1", False)


STEPS = [route.split(" run")[0] for route in LOAD if route != "/weight_checker"]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("next_sha", ["A", "B"], ids=["same-target", "newer-target"])
async def test_killed_at_any_step_the_next_weight_sync_completes(
    step: str, moment: str, next_sha: str
) -> None:
    world = World()
    first = world.publish(published("run", 1, "A"))
    setattr(world, f"hang_{moment}", step)
    task = asyncio.create_task(world.new_sync().bring_to(first))
    await world.hung.wait()
    task.cancel()
    world.hang_before = world.hang_after = ""

    target = first if next_sha == "A" else world.publish(published("run", 2, "B"))
    await world.new_sync().bring_to(target)
    assert (world.weights, world.version, world.is_paused) == (next_sha, str(target.version), False)
    assert world.gateways["http://gw.test"].settled == str(target.version)
    assert world.gateways["http://gw.test"].pending is None
    assert world.states[-1].status == "ready"
