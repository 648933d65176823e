"""Which engine a call gets: sticky, fenced by version, drained, waited for within a bound."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Self

import pytest

from polar.gateway.engines import CAPTURE_ALARM_AFTER, EnginePool, NoEngineError
from polar.gateway.probe import EngineFacts, EngineUnfitError
from polar.gateway.upstream import Response
from polar.gateway.versions import CurrentPolicy
from schemas.policies import BASE_VERSION, PolicyVersion
from tests.unit.gateway.fake_engine import FakeEngine, running_engine
from tests.unit.gateway.running import RunningGateway, eventually, question, running_gateway


def version(step: int, lineage: str = "run") -> PolicyVersion:
    return PolicyVersion(lineage=lineage, step=step)


class FakeAdapter:
    """An engine that is whatever the test says."""

    gives_ids = True

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.url = f"http://{engine_id}.test"
        self.runs = BASE_VERSION
        self.unfit = ""
        self.is_answering = True

    async def probe(self) -> EngineFacts:
        if self.unfit:
            raise EngineUnfitError(self.unfit, "as the test says")
        return EngineFacts(self.runs, None, rendering="no_renderer", logprobs_mode="processed_logprobs")

    async def weight_version(self) -> PolicyVersion:
        return self.runs

    async def is_healthy(self) -> bool:
        return self.is_answering

    async def count_tokens(self, body: Mapping[str, Any]) -> int:
        return len(body)

    def chat(
        self, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Response]:
        raise AssertionError("these tests choose engines and call none")


class Fleet:
    """A pool over fake engines, with its watchers running."""

    def __init__(self, *names: str, wait_seconds: float = 30.0) -> None:
        self.adapters = {name: FakeAdapter(name) for name in names}
        self.pool = EnginePool(list(self.adapters.values()), probe_seconds=0.01, wait_seconds=wait_seconds)
        self.watching: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self.watching = asyncio.create_task(self.pool.run())
        await eventually(lambda: not any(slot.reason for slot in self.pool.slots.values()), 10.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.watching.cancel()
        await asyncio.wait({self.watching})

    def update(self, name: str, to: PolicyVersion) -> None:
        self.pool.tell(name, "pending", to)
        self.pool.tell(name, "settled", to)
        self.adapters[name].runs = to

    async def used(self, number: int = 20) -> set[str]:
        return {(await self.pool.acquire(f"task/{i}/0/1")).engine_id for i in range(number)}


async def test_a_session_stays_with_its_engine() -> None:
    async with Fleet("a", "b", "c") as fleet:
        first = await fleet.pool.acquire("task/0/0/1")
        for name in fleet.pool.slots:
            assert (await fleet.pool.acquire("task/0/0/1", name)).engine_id == name
        first.in_flight = 50
        assert (await fleet.pool.acquire("task/0/0/1", first.engine_id)) is not first
        assert await fleet.used() == {"a", "b", "c"} - {first.engine_id}


async def test_an_engine_that_is_behind_gets_no_calls() -> None:
    async with Fleet("a", "b", "c") as fleet:
        assert await fleet.used() == {"a", "b", "c"}
        fleet.pool.tell("a", "pending", version(1))
        assert await fleet.used() == {"b", "c"}  # a stands still
        fleet.pool.tell("a", "settled", version(1))
        assert await fleet.used() == {"a"}
        fleet.update("b", version(1))
        assert await fleet.used() == {"a", "b"}
        # c fails to load, and says that it still has the old weights.
        fleet.pool.tell("c", "pending", version(1))
        fleet.pool.tell("c", "settled", BASE_VERSION)
        assert await fleet.used() == {"a", "b"}
        fleet.update("c", version(1))
        assert await fleet.used() == {"a", "b", "c"}


async def test_an_engine_that_restarts_with_its_base_weights_waits_for_the_current_ones() -> None:
    async with Fleet("a", "b") as fleet:
        fleet.update("a", version(3))
        fleet.update("b", version(3))
        fleet.adapters["b"].runs = BASE_VERSION
        fleet.pool.slots["b"].suspect("engine_down", "it was restarted")
        await eventually(lambda: not fleet.pool.slots["b"].reason)
        assert await fleet.used() == {"a"}
        fleet.update("b", version(3))
        assert await fleet.used() == {"a", "b"}


async def test_while_all_are_updated_calls_wait_and_none_is_refused() -> None:
    async with Fleet("a", "b") as fleet:
        for name in ("a", "b"):
            fleet.pool.tell(name, "pending", version(1))
        calls = [asyncio.create_task(fleet.pool.acquire(f"task/{i}/0/1")) for i in range(10)]
        await eventually(lambda: fleet.pool.num_waiting == 10)
        assert not any(call.done() for call in calls)
        fleet.pool.tell("b", "settled", version(1))
        slots = await asyncio.gather(*calls)
        assert {slot.engine_id for slot in slots} == {"b"}
        assert {str(slot.versions.settled) for slot in slots} == {"run:1"}
        assert fleet.pool.num_waiting == 0


async def test_the_wait_is_bounded_and_ends_on_an_engine_that_is_behind() -> None:
    async with Fleet("a", "b", wait_seconds=0.05) as fleet:
        fleet.update("a", version(1))
        fleet.adapters["a"].unfit = "engine_down"
        fleet.pool.slots["a"].suspect("engine_down", "gone")
        slot = await fleet.pool.acquire("task/0/0/1", "a")
        assert (slot.engine_id, slot.versions.settled) == ("b", BASE_VERSION)


async def test_a_question_without_sampling_waits_for_no_weights() -> None:
    async with Fleet("a") as fleet:
        fleet.pool.tell("a", "pending", version(1))
        assert fleet.pool.any_fit().engine_id == "a"
        fleet.pool.drain("a", is_draining=True)
        with pytest.raises(NoEngineError):
            fleet.pool.any_fit()


async def test_nobody_waits_for_engines_that_are_down() -> None:
    async with Fleet("a", "b") as fleet:
        fleet.pool.tell("a", "pending", version(1))
        fleet.pool.tell("b", "pending", version(1))
        waiting = asyncio.create_task(fleet.pool.acquire("task/0/0/1"))
        await eventually(lambda: fleet.pool.num_waiting == 1)
        for name, adapter in fleet.adapters.items():
            adapter.unfit = "engine_down"
            fleet.pool.slots[name].suspect("engine_down", "gone")
        with pytest.raises(NoEngineError, match="engine_down"):
            await asyncio.wait_for(waiting, 5)
        assert fleet.pool.num_waiting == 0


async def test_a_draining_engine_gets_no_calls() -> None:
    async with Fleet("a", "b") as fleet:
        assert fleet.pool.drain("nobody", is_draining=True) is None
        fleet.pool.drain("a", is_draining=True)
        assert await fleet.used() == {"b"}
        assert fleet.pool.trouble is None
        fleet.pool.drain("b", is_draining=True)
        with pytest.raises(NoEngineError, match="draining") as caught:
            await fleet.pool.acquire("task/0/0/1")
        assert caught.value.reason == "engines_draining"
        fleet.pool.drain("b", is_draining=False)
        assert await fleet.used() == {"b"}


async def test_an_engine_that_stops_to_prove_its_ids_must_prove_itself_anew() -> None:
    async with Fleet("a", "b") as fleet:
        slot = fleet.pool.slots["a"]
        for _ in range(3):
            for _ in range(CAPTURE_ALARM_AFTER - 1):
                slot.note_capture(is_complete=False)
            slot.note_capture(is_complete=True)
        assert (slot.capture_alarms, slot.reason) == (0, "")
        fleet.adapters["a"].unfit = "engine_incomplete_ids"
        for _ in range(CAPTURE_ALARM_AFTER):
            slot.note_capture(is_complete=False)
        assert (slot.capture_alarms, slot.reason) == (1, "engine_incomplete_ids")
        assert await fleet.used() == {"b"}
        fleet.adapters["a"].unfit = ""
        await eventually(lambda: not slot.reason)


def test_the_current_policy_never_goes_back() -> None:
    current = CurrentPolicy()
    seen = []
    for told in (
        version(1),
        version(3),
        version(2),
        BASE_VERSION,
        version(0, "later"),
        version(9),
        version(2, "later"),
    ):
        current.settled(told)
        seen.append(str(current.version))
    assert seen == ["run:1", "run:3", "run:3", "run:3", "later:0", "later:0", "later:2"]
    current.observed(version(7, "unknown"))
    assert str(current.version) == "later:2"
    current.observed(version(4, "later"))
    assert str(current.version) == "later:4"


async def test_calls_of_a_session_go_to_one_of_two_engines_until_it_drains(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with (
        running_engine() as second,
        running_gateway(tmp_path, f"a={engine.url},b={second.url}") as gateway,
    ):
        await eventually(lambda: not any(slot.reason for slot in gateway.parts.engines.slots.values()))
        key = await gateway.open()
        for number in range(4):
            assert (await gateway.chat(key, question(str(number))))[0] == 200
        (mine,) = {record.engine_id for record in gateway.log.calls()}
        other = {"a": "b", "b": "a"}[mine]
        drained = await gateway.admin("POST", "/admin/engines/drain", {"engine_id": mine})
        assert drained == (200, {"draining": True, "in_flight": 0})
        assert (await gateway.chat(key, question("4")))[0] == 200
        assert gateway.log.calls()[-1].engine_id == other
        assert (await gateway.admin("POST", "/admin/engines/drain", {"engine_id": "nobody"}))[0] == 404
        _, state = await gateway.admin("GET", "/admin/state")
        assert state["engines"][mine]["draining"]


async def test_an_engine_drains_until_somebody_ends_it_whatever_restarts(
    engine: FakeEngine, tmp_path: Path
) -> None:
    def draining(gateway: RunningGateway) -> set[str]:
        return {name for name, slot in gateway.parts.engines.slots.items() if slot.is_draining}

    async def drain(gateway: RunningGateway, name: str, *, until_now: bool = False) -> int:
        body = {"engine_id": name, "is_draining": not until_now}
        return (await gateway.admin("POST", "/admin/engines/drain", body))[0]

    async with running_engine() as second:
        urls = f"a={engine.url},b={second.url},c={second.url}"
        async with running_gateway(tmp_path, urls) as gateway:
            assert draining(gateway) == set()
            assert [await drain(gateway, "a"), await drain(gateway, "c")] == [200, 200]
            await drain(gateway, "c", until_now=True)
        async with running_gateway(tmp_path, urls) as gateway:
            assert draining(gateway) == {"a"}
            await eventually(lambda: not gateway.parts.engines.slots["a"].reason)
            key = await gateway.open()
            for number in range(4):
                assert (await gateway.chat(key, question(str(number))))[0] == 200
            assert {record.engine_id for record in gateway.log.calls()} <= {"b", "c"}
            assert await drain(gateway, "b") == 200
        # Another server under the name: it is not the one that somebody wanted to stop.
        async with running_gateway(tmp_path, f"a={second.url},b={second.url}") as gateway:
            assert draining(gateway) == {"b"}
            assert await drain(gateway, "b", until_now=True) == 200
        async with running_gateway(tmp_path, urls) as gateway:
            assert draining(gateway) == set()


async def test_a_drain_that_cannot_be_kept_is_refused_and_a_spoilt_file_stops_no_gateway(
    engine: FakeEngine, tmp_path: Path
) -> None:
    file = tmp_path / "gateway" / "gateway-0" / "drains.json"
    file.parent.mkdir(parents=True)
    file.write_text("{")
    async with running_gateway(tmp_path, engine.url) as gateway:
        file.unlink()
        file.mkdir()  # nothing can take its place
        (file / "x").touch()
        status, body = await gateway.admin("POST", "/admin/engines/drain", {"engine_id": "engine-0"})
        assert (status, body["error"]["code"]) == (503, "spool_error")
        assert not gateway.parts.engines.slots["engine-0"].is_draining


async def test_a_session_that_is_sealed_while_its_call_waits_takes_it_no_more(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    key = await gateway.open()
    gateway.parts.engines.tell("engine-0", "pending", version(1))
    call = asyncio.create_task(gateway.chat(key))
    await eventually(lambda: gateway.parts.engines.num_waiting == 1)
    assert await gateway.seal() == 0
    gateway.parts.engines.tell("engine-0", "settled", version(1))
    status, body, _ = await call
    assert (status, body["error"]["code"]) == (401, "session_sealed")
    assert engine.requests == []
    assert gateway.log.calls() == []
