"""Which policy is brought to an engine, and when."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from polar.weightsync.board import Board
from polar.weightsync.loop import keep_current
from tests.unit.weightsync.fake_world import World, published


async def stopped(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def until(condition: Callable[[World], object], world: World) -> None:
    async with asyncio.timeout(5):
        while not condition(world):  # noqa: ASYNC110 (the fake world has no events of its own)
            await asyncio.sleep(0.001)


async def test_superseded_versions_are_skipped() -> None:
    world, board = World(), Board("policy")
    for step in range(1, 6):
        board.put(world.publish(published("run", step, f"S{step}")))
    task = asyncio.create_task(keep_current(world.new_sync(), board, poll_seconds=0.01))
    await asyncio.sleep(0.02)
    assert world.calls == []  # the log has not been read to its end
    board.open()
    await until(lambda w: w.states, world)
    assert world.version == "run:5"
    assert world.calls.count("/update_weights") == 1
    await stopped(task)


async def test_a_newer_policy_and_a_restarted_engine_are_noticed() -> None:
    world, board = World(), Board("policy")
    board.open()
    task = asyncio.create_task(keep_current(world.new_sync(), board, poll_seconds=0.01))
    board.put(world.publish(published("run", 1, "A")))
    await until(lambda w: w.version == "run:1" and w.states, world)
    board.put(world.publish(published("run", 2, "B")))
    await until(lambda w: w.version == "run:2" and len(w.states) == 2, world)
    world.gateways["http://gw.test"].settled = "base:0"
    world.restart_engine()
    await until(lambda w: w.version == "run:2" and len(w.states) == 3, world)
    assert world.weights == "B"
    await stopped(task)


async def test_an_engine_that_comes_up_later_is_loaded() -> None:
    world, board = World(is_down=True), Board("policy")
    board.open()
    board.put(world.publish(published("run", 1, "A")))
    task = asyncio.create_task(keep_current(world.new_sync(), board, poll_seconds=0.01))
    await until(lambda w: w.states, world)
    assert world.states[0].status == "failed"
    world.is_down = False
    await until(lambda w: w.states[-1].status == "ready", world)
    await stopped(task)


async def test_a_stop_lets_a_load_come_to_its_end() -> None:
    world, board = World(), Board("policy")
    board.open()
    board.put(world.publish(published("run", 1, "A")))
    task = asyncio.create_task(keep_current(world.new_sync(), board, poll_seconds=0.01))
    await until(lambda w: w.is_paused, world)
    await stopped(task)
    assert (world.weights, world.version, world.is_paused) == ("A", "run:1", False)


async def test_other_policies_are_ignored() -> None:
    board = Board("policy")
    board.open()
    other = published("run", 1, "A").model_copy(update={"policy": "other"})
    board.put(other)
    mine = published("run", 2, "B")
    asyncio.get_running_loop().call_later(0.01, board.put, mine)
    assert await asyncio.wait_for(board.newest(), 5) is mine
