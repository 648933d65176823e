"""The rollout API over a scheduler core in memory."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from polar.errors import LogUnavailableError, RecordTooLargeError
from polar.rollout.api import RolloutApi
from schemas.base import Event
from schemas.sessions import Outcome
from schemas.tasks import RolloutTask, TaskCancelled
from tests.unit.rollout.scheduler_world import World

TASK = {"harness": {"command": "true"}, "num_samples": 2}


class WorldWriter:
    """Writes to the world's log; `trouble` is raised instead."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.trouble: Exception | None = None

    async def write(self, event: Event) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.world.write(event)


class Api:
    def __init__(self, client: httpx.AsyncClient, world: World, writer: WorldWriter) -> None:
        self.client = client
        self.world = world
        self.writer = writer

    async def post(self, body: Any, status: int = 202) -> dict[str, Any]:
        answer = await self.client.post("/tasks", json=body)
        assert answer.status_code == status, answer.text
        value: dict[str, Any] = answer.json()
        return value

    async def get(self, path: str, status: int = 200) -> dict[str, Any]:
        answer = await self.client.get(path)
        assert answer.status_code == status, answer.text
        value: dict[str, Any] = answer.json()
        return value

    def tasks(self) -> list[RolloutTask]:
        return [event for event in self.world.written if isinstance(event, RolloutTask)]


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    world = World(nodes=["n0"])
    world.boot()
    world.round()
    assert world.core is not None
    writer = WorldWriter(world)
    app = RolloutApi(world.core, writer, max_open_tasks=3).app()  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        yield Api(client, world, writer)


async def test_a_task_is_accepted_runs_and_is_told_to_its_end(api: Api) -> None:
    accepted = await api.post(TASK)
    task_id = accepted["task_id"]
    assert accepted["state"] == "accepted"
    assert (await api.get(f"/tasks/{task_id}"))["state"] == "accepted"
    (task,) = api.tasks()
    assert task.task_id == task.spec.task_id == task_id

    api.world.round(finish=False)
    api.world.round(finish=False)
    running = await api.get(f"/tasks/{task_id}")
    assert (running["state"], running["group"]) == ("running", "open")
    assert [member["state"] for member in running["members"]] == ["running", "running"]
    assert running["members"][0]["session_id"] == f"{task_id}/0/0/1"
    assert running["members"][0]["node_id"] == "n0"

    api.world.round()
    api.world.round()
    finished = await api.get(f"/tasks/{task_id}")
    assert (finished["state"], finished["group"]) == ("finished", "members_fixed")
    assert [member["outcome"] for member in finished["members"]] == ["completed", "completed"]
    listed = await api.get("/tasks?state=finished")
    assert [row["task_id"] for row in listed["tasks"]] == [task_id]
    assert "members" not in listed["tasks"][0]


async def test_attempts_are_counted(api: Api) -> None:
    await api.post({**TASK, "task_id": "t", "num_samples": 1})
    api.world.round(finish=False)
    api.world.round(finish=False)
    api.world.finish(api.world.nodes["n0"], "t/0/0/1", Outcome.INFRA_ERROR)
    for _ in range(3):
        api.world.round()
    (member,) = (await api.get("/tasks/t"))["members"]
    assert (member["session_id"], member["attempts"]) == ("t/0/1/1", 2)


async def test_the_same_id_twice_is_one_task(api: Api) -> None:
    await api.post({**TASK, "task_id": "t"})
    again = await api.post({**TASK, "task_id": "t"}, status=200)
    assert again == {"task_id": "t", "state": "accepted"}
    for _ in range(4):
        api.world.round()
    assert (await api.post({**TASK, "task_id": "t"}, status=200))["state"] == "finished"
    assert len(api.tasks()) == 1


@pytest.mark.parametrize(
    ("body", "field", "remedy"),
    [
        ({**TASK, "harnes": 1}, "harnes", "did you mean 'harness'?"),
        ({"harness": {"command": "x", "comand": "y"}}, "harness.comand", "did you mean 'command'?"),
        ({**TASK, "timeouts": {"zzz": 1}}, "timeouts.zzz", "known fields: group_seconds, init_seconds"),
        ({"num_samples": 1}, "harness", "add harness"),
        ({**TASK, "num_samples": 0}, "num_samples", "correct num_samples"),
        ({**TASK, "task_id": "a/b"}, "task_id", "correct task_id"),
        ({**TASK, "evaluator": {"kind": "command"}}, "evaluator", "correct evaluator"),
        ({**TASK, "runtime": {"files": {"../x": ""}}}, "runtime", "correct runtime"),
        ({**TASK, "prompt": "x" * 200_000}, "prompt", "runtime.files"),
        ({**TASK, "metadata": {"x": "y" * 200_000}}, "metadata", "runtime.files"),
    ],
)
async def test_a_wrong_field_is_named_with_its_remedy(api: Api, body: Any, field: str, remedy: str) -> None:
    error = (await api.post(body, status=422))["error"]
    assert error["type"] == "invalid_task"
    assert error["field"] == field
    assert remedy in error["remedy"]
    assert not api.tasks(), "nothing is written"


async def test_every_problem_is_listed(api: Api) -> None:
    error = (await api.post({"harness": {"command": ""}, "a": 1, "b": 2}, status=422))["error"]
    assert {problem["field"] for problem in error["problems"]} == {"harness.command", "a", "b"}


@pytest.mark.parametrize(
    ("content", "content_type", "status", "kind"),
    [
        (b"{", "application/json", 400, "not_json"),
        (b"[]", "application/json", 400, "not_json"),
        (b"[" * 100_000, "application/json", 400, "not_json"),
        (b"{}", "text/plain", 415, "unsupported_media_type"),
        (b" " * (9 << 20), "application/json", 413, "too_large"),
    ],
)
async def test_a_broken_body_is_refused(
    api: Api, content: bytes, content_type: str, status: int, kind: str
) -> None:
    answer = await api.client.post("/tasks", content=content, headers={"content-type": content_type})
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind


async def test_a_broker_that_is_down_is_503_and_the_task_may_be_sent_again(api: Api) -> None:
    api.writer.trouble = LogUnavailableError("no acknowledgement")
    answer = await api.client.post("/tasks", json={**TASK, "task_id": "t"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "task_id 't'" in answer.json()["error"]["remedy"]
    api.writer.trouble = None
    await api.post({**TASK, "task_id": "t"})


async def test_a_task_that_is_too_large_for_the_log_is_413(api: Api) -> None:
    api.writer.trouble = RecordTooLargeError("17 MiB")
    assert (await api.post(TASK, status=413))["error"]["type"] == "too_large"


async def test_at_the_limit_of_open_tasks_submitting_is_429(api: Api) -> None:
    for name in "abc":
        await api.post({**TASK, "task_id": name})
    assert (await api.post(TASK, status=429))["error"]["type"] == "too_many_open_tasks"
    assert (await api.post({**TASK, "task_id": "a"}, status=200))["task_id"] == "a"
    for _ in range(8):
        api.world.round()
    await api.post(TASK)


async def test_cancelling(api: Api) -> None:
    await api.post({**TASK, "task_id": "t"})
    api.world.round(finish=False)
    answer = await api.client.delete("/tasks/t?reason=enough")
    assert (answer.status_code, answer.json()["state"]) == (202, "cancelling")
    (cancelled,) = [event for event in api.world.written if isinstance(event, TaskCancelled)]
    assert cancelled.reason == "enough"
    api.world.drain()
    assert (await api.client.delete("/tasks/t")).status_code == 200
    for _ in range(3):
        api.world.round(finish=False)
    view = await api.get("/tasks/t")
    assert (view["state"], view["group_reason"]) == ("finished", "cancelled")


async def test_unknown_tasks_and_routes(api: Api) -> None:
    assert (await api.get("/tasks/none", status=404))["error"]["type"] == "unknown_task"
    assert (await api.client.delete("/tasks/none")).status_code == 404
    assert (await api.get("/nothing", status=404))["error"]["type"] == "http_error"
    assert (await api.client.put("/tasks")).status_code == 405
    assert (await api.get("/tasks?limit=x", status=400))["error"]["type"] == "invalid_limit"


async def test_nodes_and_health(api: Api) -> None:
    (node,) = (await api.get("/nodes"))["nodes"]
    assert node["node_id"] == "n0"
    assert node["counts"]["running"] == 0
    health = await api.get("/health")
    assert health["status"] == "alive"
    assert health["scheduler"]["is_deciding"] == 1.0
