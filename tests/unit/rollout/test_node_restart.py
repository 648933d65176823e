"""A node that is stopped or killed, and comes back."""

import asyncio
import sys
from pathlib import Path

from schemas.nodes import NodeHeartbeat
from schemas.sessions import Outcome, SessionFinished, SessionStarted
from tests.unit.rollout.fake_gateway import closed_port_url
from tests.unit.rollout.node_world import NodeWorld, is_alive, pid_in, task

ROOT = Path(__file__).resolve().parents[3]

NODE_PROGRAM = """
import asyncio, sys
from pathlib import Path
from polar.settings import NodeSettings
from tests.unit.rollout.fake_gateway import FakeGateway
from tests.unit.rollout.node_world import NodeWorld, task

async def main():
    async with FakeGateway().running() as gateway:
        world = NodeWorld(Path(sys.argv[1]), gateway, NodeSettings(id="n0"))
        async with world.node() as node:
            world.start(node, task(
                "echo $$ > leader; setsid sh -c 'echo $$ > grandchild; sleep 600; true' & sleep 600; true"))
            world.prewarm(node, task(prepare=("echo $$ > warm",)), 1)
            await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_stop_ends_processes_and_the_next_life_reports_the_session(world: NodeWorld) -> None:
    async with world.node() as node:
        world.start(node, task("echo $$ > pid; exec sleep 600"))
        await world.writer.wait_for(SessionStarted)
        pid = await pid_in(world, "pid")
    assert not is_alive(pid)
    assert isinstance(world.writer.events[-1], NodeHeartbeat)
    assert world.writer.events[-1].draining
    async with world.node():
        (finished,) = await world.writer.wait_for(SessionFinished)
    assert (finished.outcome, finished.reason) == (Outcome.INFRA_ERROR, "node_restarted")
    assert finished.sealed
    assert world.gateway.sealed["t/0/0/1"]["outcome"] == "infra_error"
    async with world.node() as node:
        assert not node.heartbeat().leases, "it is reported once"


async def test_a_node_killed_with_9_leaves_nothing_that_survives_its_next_start(world: NodeWorld) -> None:
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE_PROGRAM, str(world.directory), cwd=ROOT
    )
    try:
        pids = {name: await pid_in(world, name) for name in ("leader", "grandchild")}
    finally:
        program.kill()
        await program.wait()
    assert is_alive(pids["grandchild"]), "the test would prove nothing"
    async with world.node() as node:
        assert not any(is_alive(pid) for pid in pids.values())
        assert node.heartbeat().leases == ("t/0/0/1",)
        (finished,) = await world.writer.wait_for(SessionFinished)
    assert finished.reason.startswith("node_restarted"), "its gateway is gone, so it is not sealed either"
    assert (finished.outcome, finished.sealed) == (Outcome.INFRA_ERROR, False)


async def test_leftovers_of_others_are_not_touched(world: NodeWorld, tmp_path: Path) -> None:
    """A recorded pid that now belongs to another process is left alone."""
    from polar.rollout.journal import Journal, NotedProcess

    world.directory.mkdir()
    bystander = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    try:
        journal = Journal(world.directory / "journal.sqlite")
        journal.add_process(NotedProcess(bystander.pid, 1, str(tmp_path)))
        journal.close()
        async with world.node():
            assert is_alive(bystander.pid)
    finally:
        bystander.kill()
        await bystander.wait()


async def test_a_session_whose_gateway_stays_down_is_reported_unsealed(world: NodeWorld) -> None:
    async with world.node() as node:
        world.start(node, task(), url=closed_port_url())
        await asyncio.sleep(0.3)
    async with world.node():
        (finished,) = await world.writer.wait_for(SessionFinished)
    assert (finished.outcome, finished.sealed) == (Outcome.INFRA_ERROR, False)


async def test_positions_survive(world: NodeWorld) -> None:
    async with world.node() as node:
        assert node.positions() == {}
        node.begin_at({0: 5, 1: 7})
        world.offset = 9
        world.start(node, task())
        await world.writer.wait_for(SessionFinished)
    async with world.node() as node:
        assert node.positions() == {0: 11, 1: 7}
