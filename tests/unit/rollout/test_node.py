"""A node's sessions: outcomes, seals, failures of everything around them."""

import asyncio
import json
import time
from typing import Any

import pytest
from starlette.responses import JSONResponse

from polar.core.session_keys import admin_token, validate
from polar.settings import NodeSettings
from schemas.base import Event
from schemas.nodes import StartSession
from schemas.rewards import Reward
from schemas.sessions import Outcome, SessionFinished, SessionReady, SessionStarted
from schemas.tasks import EvaluatorSpec, SamplingSpec
from tests.unit.rollout.fake_gateway import closed_port_url
from tests.unit.rollout.node_world import SECRET, NodeWorld, is_alive, pid_in, task, until


def kinds(events: list[Event]) -> list[str]:
    return [event.type for event in events if event.type != "NodeHeartbeat"]


async def test_a_session_runs_is_sealed_evaluated_and_reported_in_this_order(world: NodeWorld) -> None:
    spec = task(
        'echo "$OPENAI_BASE_URL" > url; echo "$OPENAI_API_KEY" > key; env > environment',
        evaluator=EvaluatorSpec(kind="command", command="test -s url && env > evaluator-environment"),
        prompt="say hi",
        metadata={"a": [1, "ü"]},
        sampling=SamplingSpec(temperature=0.7),
    )
    finished = await world.run(spec)
    assert (finished.outcome, finished.sealed, finished.calls) == (Outcome.COMPLETED, True, 3)
    assert kinds(world.writer.events) == ["SessionReady", "SessionStarted", "Reward", "SessionFinished"]
    assert world.gateway.sealed["t/0/0/1"]["outcome"] == "completed"
    assert world.gateway.authorizations == {f"Bearer {admin_token(SECRET)}"}

    url, key = (world.runtime_files(name)[0].read_text().strip() for name in ("url", "key"))
    assert url == f"{world.gateway.url}/v1"
    claims = validate(SECRET, key, gateway_id="g0").at(time.time())
    assert (claims.session_id, claims.sampling.temperature) == ("t/0/0/1", 0.7)
    assert claims.expires_at == world.gateway.opened["t/0/0/1"]["expires_at"]
    assert world.gateway.opened["t/0/0/1"]["sampling"]["temperature"] == 0.7

    (file,) = world.runtime_files("environment")
    seen = dict(line.split("=", 1) for line in file.read_text().splitlines() if "=" in line)
    assert seen["POLAR_BASE_URL_PREFIXED"] == f"{world.gateway.url}/s/{key}/v1"
    assert seen["POLAR_PROMPT"] == "say hi"
    assert json.loads(seen["POLAR_METADATA"]) == {"a": [1, "ü"]}
    assert (seen["POLAR_TASK_ID"], seen["POLAR_MEMBER"]) == ("t", "0")
    assert seen["HOME"] == seen["POLAR_RUNTIME_DIR"] == str(file.parent)
    (file,) = world.runtime_files("evaluator-environment")
    assert "POLAR_OUTCOME=completed" in file.read_text()
    assert key not in file.read_text(), "an evaluator has no business at the gateway"


async def test_the_nodes_own_environment_stays_outside(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_SECRET_FILE", "/secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    await world.run(task("env > environment"))
    assert "secret" not in world.runtime_files("environment")[0].read_text()


async def test_a_harness_that_fails_is_an_agent_error_with_its_last_words(world: NodeWorld) -> None:
    finished = await world.run(task("echo first >&2; echo boom >&2; exit 1"))
    assert finished.outcome is Outcome.AGENT_ERROR
    assert finished.reason == "the harness ended with exit status 1: boom"
    assert finished.sealed


async def test_a_harness_that_hangs_is_killed_as_a_whole(world: NodeWorld) -> None:
    hang = (
        "trap '' TERM; sleep 600 & echo $! > child; "
        "setsid sh -c 'trap \"\" TERM; echo $$ > grandchild; sleep 600' & "
        "echo $$ > leader; wait"
    )
    finished = await world.run(task(hang, run_seconds=0.5))
    assert finished.outcome is Outcome.TIMED_OUT
    assert world.gateway.sealed["t/0/0/1"]["outcome"] == "timed_out"
    for name in ("leader", "child", "grandchild"):
        assert not is_alive(int(world.runtime_files(name)[0].read_text())), name


async def test_what_a_finished_harness_leaves_in_the_background_is_ended(world: NodeWorld) -> None:
    finished = await world.run(
        task("setsid sh -c 'echo $$ > left; exec sleep 600' & while ! test -s left; do :; done")
    )
    assert finished.outcome is Outcome.COMPLETED
    assert not is_alive(int(world.runtime_files("left")[0].read_text()))


async def test_output_is_bounded_with_head_and_tail(world: NodeWorld) -> None:
    finished = await world.run(task("echo HEAD; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo TAIL"))
    assert finished.outcome is Outcome.COMPLETED
    text = world.runtime_files("harness.stdout.log")[0].read_text()
    assert text.startswith("HEAD\n")
    assert text.endswith("TAIL\n")
    assert "bytes left out]" in text
    assert len(text) < 1_200_000


@pytest.mark.parametrize(
    ("command", "rewards"),
    [
        ("exit 0", {"outcome": 1.0}),
        ("exit 3", {"outcome": 0.0}),
        ("echo talk; echo 0.25", {"outcome": 0.25}),
        ('echo \'{"outcome": 1, "style": -0.5}\'; exit 1', {"outcome": 1.0, "style": -0.5}),
        ("echo true", {"outcome": 1.0}),
        ("echo '[1]'; exit 1", {"outcome": 0.0}),
    ],
)
async def test_evaluator_scores(world: NodeWorld, command: str, rewards: dict[str, float]) -> None:
    await world.run(task(evaluator=EvaluatorSpec(kind="command", command=command)))
    found = [event for event in world.writer.events if isinstance(event, Reward)]
    assert {reward.name: reward.value for reward in found} == rewards
    assert len({reward.reward_id for reward in found}) == len(found)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sleep 600", "the evaluator was not done"),
        ("echo NaN", "not a finite number"),
        ('echo \'{"a": "b"}\'', "not a finite number"),
    ],
)
async def test_an_evaluator_without_a_score_leaves_the_reward_missing(
    world: NodeWorld, command: str, words: str
) -> None:
    evaluator = EvaluatorSpec(kind="command", command=command, timeout_seconds=0.3)
    finished = await world.run(task(evaluator=evaluator))
    assert finished.outcome is Outcome.COMPLETED
    assert words in finished.reason
    assert "Reward" not in kinds(world.writer.events)


async def test_an_agent_error_is_evaluated_a_timeout_is_not(world: NodeWorld) -> None:
    evaluator = EvaluatorSpec(kind="command", command="echo 0.5")
    async with world.node() as node:
        world.start(node, task("exit 1", evaluator=evaluator), session_id="a/0/0/1")
        world.start(node, task("sleep 600", run_seconds=0.2, evaluator=evaluator), session_id="b/0/0/1")
        await world.writer.wait_for(SessionFinished, count=2)
    assert [event.session_id for event in world.writer.events if isinstance(event, Reward)] == ["a/0/0/1"]


async def test_a_gateway_that_is_down_is_an_infrastructure_error_in_bounded_time(world: NodeWorld) -> None:
    began = time.monotonic()
    finished = await world.run(task("touch ran"), url=closed_port_url())
    assert finished.outcome is Outcome.INFRA_ERROR
    assert "did not open the session within 1.5 s" in finished.reason
    assert not finished.sealed, "it may have been opened all the same"
    assert not world.runtime_files("ran")
    assert time.monotonic() - began < 8


async def test_a_gateway_that_comes_back_is_waited_for(world: NodeWorld) -> None:
    world.gateway.failures = 2
    assert (await world.run(task())).outcome is Outcome.COMPLETED


async def test_a_gateway_that_refuses_is_not_asked_again(world: NodeWorld) -> None:
    world.gateway.refusal = JSONResponse({"error": "sealed"}, status_code=409)
    finished = await world.run(task())
    assert finished.outcome is Outcome.INFRA_ERROR
    assert "refused to open" in finished.reason
    assert "409" in finished.reason


async def test_a_seal_that_is_not_confirmed_makes_it_an_infrastructure_error(world: NodeWorld) -> None:
    async with world.node() as node:
        world.start(
            node, task("touch running; sleep 0.5", evaluator=EvaluatorSpec(kind="command", command="true"))
        )
        await world.writer.wait_for(SessionStarted)
        world.gateway.failures = 1000
        (finished,) = await world.writer.wait_for(SessionFinished)
    assert (finished.outcome, finished.sealed) == (Outcome.INFRA_ERROR, False)
    assert "did not seal" in finished.reason
    assert "Reward" not in kinds(world.writer.events)


async def test_a_runtime_that_cannot_be_prepared_never_reaches_the_gateway(world: NodeWorld) -> None:
    finished = await world.run(task(prepare=("true", "echo no disk >&2; exit 4")))
    assert finished.outcome is Outcome.INFRA_ERROR
    assert finished.reason == "prepare command 2 failed, exit status 4: no disk"
    assert finished.sealed
    assert not world.gateway.opened
    assert kinds(world.writer.events) == ["SessionFinished"]


async def test_the_init_budget_is_kept(world: NodeWorld) -> None:
    finished = await world.run(task(prepare=("sleep 600",), init_seconds=0.3))
    assert finished.outcome is Outcome.INFRA_ERROR
    assert "timeouts.init_seconds" in finished.reason


async def test_files_lie_in_the_runtime_before_it_is_prepared(world: NodeWorld) -> None:
    spec = task("cat a/b.txt > copy", prepare=("cat a/b.txt",), runtime={"files": {"a/b.txt": "hello\n"}})
    assert (await world.run(spec)).outcome is Outcome.COMPLETED
    assert world.runtime_files("copy")[0].read_text() == "hello\n"


async def test_cancelling_a_running_session_kills_and_seals_it(world: NodeWorld) -> None:
    async with world.node() as node:
        world.start(node, task("echo $$ > pid; exec sleep 600"))
        await world.writer.wait_for(SessionStarted)
        pid = await pid_in(world, "pid")
        world.cancel(node)
        (finished,) = await world.writer.wait_for(SessionFinished)
    assert (finished.outcome, finished.reason) == (Outcome.CANCELLED, "enough")
    assert world.gateway.sealed["t/0/0/1"]["outcome"] == "cancelled"
    assert not is_alive(pid)


async def test_cancelling_before_it_began_runs_nothing(world: NodeWorld) -> None:
    async with world.node() as node:
        world.start(node, task("touch ran"))
        world.cancel(node)
        (finished,) = await world.writer.wait_for(SessionFinished)
    assert finished.outcome is Outcome.CANCELLED
    assert not world.gateway.opened
    assert not world.runtime_files("ran")


async def test_a_session_is_run_once_however_often_it_is_commanded(world: NodeWorld) -> None:
    async with world.node() as node:
        world.start(node, task("echo x >> ran"))
        world.start(node, task("echo x >> ran"))
        await world.writer.wait_for(SessionFinished)
        world.start(node, task("echo x >> ran"))
        await asyncio.sleep(0.2)
        assert not node.heartbeat().leases
    async with world.node() as node:
        world.start(node, task("echo x >> ran"))
        await asyncio.sleep(0.2)
    assert len(world.runtime_files("ran")) == 1
    assert kinds(world.writer.events).count("SessionFinished") == 1


async def test_commands_of_other_nodes_are_left_alone(world: NodeWorld) -> None:
    async with world.node() as node:
        world.settings = NodeSettings(id="other")
        world.start(node, task())
        assert not node.heartbeat().leases


async def test_an_outage_of_the_broker_delays_and_loses_nothing(world: NodeWorld) -> None:
    world.writer.outages = 2
    finished = await world.run(task())
    assert finished.outcome is Outcome.COMPLETED
    assert kinds(world.writer.events) == ["SessionReady", "SessionStarted", "SessionFinished"]


async def test_one_broken_session_does_not_touch_the_others(
    world: NodeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.node() as node:
        seal = node._parts.gateway.seal_session

        async def seal_or_explode(start: StartSession, *more: Any) -> int:
            if start.session_id.startswith("bad"):
                raise ZeroDivisionError("a defect")
            return await seal(start, *more)

        monkeypatch.setattr(node._parts.gateway, "seal_session", seal_or_explode)
        world.start(node, task("true"), session_id="bad/0/0/1")
        world.start(node, task("true"), session_id="good/0/0/1")
        finished = await world.writer.wait_for(SessionFinished, count=2)
    bad, good = sorted(finished, key=lambda event: event.session_id)
    assert (bad.outcome, bad.sealed) == (Outcome.INFRA_ERROR, False)
    assert "a defect" in bad.reason
    assert (good.outcome, good.sealed) == (Outcome.COMPLETED, True)


async def test_only_max_running_harnesses_run_at_once(world: NodeWorld) -> None:
    world.settings = world.settings.model_copy(update={"max_running": 2})
    async with world.node() as node:
        for number in range(5):
            world.start(node, task("sleep 0.2"), session_id=f"t/{number}/0/1")
        most = 0
        while sum(1 for event in world.writer.events if isinstance(event, SessionFinished)) < 5:
            most = max(most, node.heartbeat().counts.running)
            await asyncio.sleep(0.02)
    assert most == 2


async def test_a_node_that_is_flooded_says_so(world: NodeWorld) -> None:
    world.settings = world.settings.model_copy(update={"max_running": 1})
    async with world.node() as node:
        for number in range(5):
            world.start(node, task("sleep 600"), session_id=f"t/{number}/0/1")
        (refused,) = await world.writer.wait_for(SessionFinished)
    assert (refused.session_id, refused.reason) == ("t/4/0/1", "the node is full")


async def test_a_warm_runtime_is_taken_and_replaced(world: NodeWorld) -> None:
    spec = task("cat warmed > seen", prepare=("echo yes > warmed",))
    async with world.node() as node:
        world.prewarm(node, spec, 2)
        await until(lambda: node.heartbeat().counts.ready == 2)
        assert node.metrics()["runtimes_by_phase"]["ready"] == 2
        assert node.heartbeat().last_command == "1/1"
        world.start(node, spec)
        (ready,) = await world.writer.wait_for(SessionReady)
        assert ready.warm
        await world.writer.wait_for(SessionFinished)
        await until(lambda: node.heartbeat().counts.ready == 2)
        (held,) = node.heartbeat().ready_digests.values()
        assert held == 2
        world.prewarm(node, spec, 0, number=2)
        assert not node.heartbeat().ready_digests
    assert len(world.runtime_files("warmed")) == 1, "idle runtimes leave no directory behind"


async def test_warm_and_warming_runtimes_never_exceed_level_nor_max_ready(world: NodeWorld) -> None:
    world.settings = world.settings.model_copy(update={"max_ready": 3})
    async with world.node() as node:
        world.prewarm(node, task(prepare=("sleep 0.05",)), 2)
        world.prewarm(node, task(prepare=("sleep 0.06",)), 2, number=2)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            held = node.heartbeat().ready_digests
            assert max(held.values()) <= 2
            assert sum(held.values()) <= 3
            await asyncio.sleep(0.02)
        assert node.heartbeat().counts.ready == 3


async def test_a_runtime_that_cannot_be_warmed_is_not_tried_without_end(world: NodeWorld) -> None:
    async with world.node() as node:
        world.prewarm(node, task(prepare=(f"echo x >> {world.directory}/tries; exit 1",)), 1)
        await asyncio.sleep(0.6)
    assert len((world.directory / "tries").read_text().split()) == 1


async def test_old_runtime_directories_are_removed(world: NodeWorld) -> None:
    async with world.node() as node:
        for number in range(6):
            world.start(node, task("echo $POLAR_MEMBER > member"), session_id=f"t/{number}/0/1")
            await world.writer.wait_for(SessionFinished, count=number + 1)
        await until(lambda: len(world.runtime_files("member")) <= 3)
    assert {path.read_text().strip() for path in world.runtime_files("member")} == {"3", "4", "5"}
