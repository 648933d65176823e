"""Tasks through scheduler and node processes on each kind of broker."""

from collections import Counter

import pytest

from polar.kafka.reader import read_all
from polar.settings import LogSettings
from schemas.base import Event
from schemas.group_events import GroupMembersFixed, GroupOpened
from schemas.nodes import StartSession
from schemas.rewards import Reward
from schemas.sessions import Outcome, SessionFinished, SessionLost, SessionReady
from schemas.topics import GROUP_EVENTS, NODE_COMMANDS, REWARDS, SESSIONS, TopicSpec
from tests.integration.rollout_deployment import RolloutDeployment

pytestmark = pytest.mark.kafka


async def events(log: LogSettings, topic: TopicSpec, kind: type[Event]) -> list[Event]:
    return [record.event for record in await read_all(log, topic) if isinstance(record.event, kind)]


async def test_tasks_run_to_their_end(log_settings: LogSettings) -> None:
    async with RolloutDeployment.running(log_settings, "n0") as polar:
        refused = await polar.api.post("/tasks", json={"harness": {"comand": "true"}})
        assert refused.status_code == 422
        assert "harness.comand" in refused.text
        evaluator = {"kind": "command", "command": "cat score"}
        await polar.submit("good", "echo 0.5 > score", num_samples=3, evaluator=evaluator)
        await polar.submit("bad", "echo broken >&2; exit 1")
        good, bad = await polar.finished("good"), await polar.finished("bad")
        assert [member["outcome"] for member in good["members"]] == ["completed"] * 3
        assert (bad["members"][0]["outcome"], bad["members"][0]["attempts"]) == ("agent_error", 1)
        assert "broken" in bad["members"][0]["reason"]

        async def buffer_is_full() -> bool:
            return bool((await polar.api.get("/health")).json()["scheduler"]["ready_depth"] == 2)

        await polar.until(buffer_is_full)
        await polar.submit("warm", "true")
        await polar.finished("warm")
        assert await polar.end("n0") == 0
        assert await polar.end("scheduler") == 0

    rewards = await events(log_settings, REWARDS, Reward)
    assert Counter((r.name, r.value) for r in rewards) == {("outcome", 0.5): 3}  # type: ignore[attr-defined]
    fixed = await events(log_settings, GROUP_EVENTS, GroupMembersFixed)
    assert sorted(event.group_id for event in fixed) == ["bad", "good", "warm"]  # type: ignore[attr-defined]
    ready = {e.group_id: e.warm for e in await events(log_settings, SESSIONS, SessionReady)}  # type: ignore[attr-defined]
    assert ready["warm"], "a READY runtime was taken"


async def test_scheduler_and_node_killed_with_9_go_on(log_settings: LogSettings) -> None:
    async with RolloutDeployment.running(log_settings, "n0") as polar:
        await polar.submit("before", "true", num_samples=2)
        await polar.finished("before")
        await polar.submit("t", "sleep 2", num_samples=6)

        async def is_running() -> bool:
            members = (await polar.task("t"))["members"]
            return sum(member["state"] == "running" for member in members) >= 4

        await polar.until(is_running)
        await polar.kill("scheduler")
        await polar.kill("n0")
        await polar.start("n0")
        await polar.start("scheduler")
        task = await polar.finished("t")
        assert [member["outcome"] for member in task["members"]] == ["completed"] * 6
        assert (await polar.task("before"))["state"] == "finished", "history survives"
        again = await polar.api.post("/tasks", json={"task_id": "before", "harness": {"command": "true"}})
        assert again.status_code == 200

    finished = await events(log_settings, SESSIONS, SessionFinished)
    ids = [event.session_id for event in finished]  # type: ignore[attr-defined]
    assert len(ids) == len(set(ids)), "no session ran twice"
    cut_off = [e for e in finished if e.outcome is Outcome.INFRA_ERROR]  # type: ignore[attr-defined]
    assert {event.reason for event in cut_off} == {"node_restarted"}  # type: ignore[attr-defined]
    assert not await events(log_settings, SESSIONS, SessionLost)
    opened = await events(log_settings, GROUP_EVENTS, GroupOpened)
    assert sorted(event.group_id for event in opened) == ["before", "t"]  # type: ignore[attr-defined]


async def test_a_node_that_does_not_come_back_is_replaced(embedded_log_settings: LogSettings) -> None:
    async with RolloutDeployment.running(embedded_log_settings, "n0", "n1") as polar:
        await polar.submit("t", "sleep 3", num_samples=4)

        async def both_run() -> bool:
            members = (await polar.task("t"))["members"]
            return {member["node_id"] for member in members if member["state"] == "running"} == {"n0", "n1"}

        await polar.until(both_run)
        await polar.kill("n0")
        task = await polar.finished("t")
        assert [member["outcome"] for member in task["members"]] == ["completed"] * 4
        assert {member["node_id"] for member in task["members"]} == {None}
    lost = {e.session_id for e in await events(embedded_log_settings, SESSIONS, SessionLost)}  # type: ignore[attr-defined]
    starts = await events(embedded_log_settings, NODE_COMMANDS, StartSession)
    assert lost == {e.session_id for e in starts if e.node_id == "n0"}  # type: ignore[attr-defined]
