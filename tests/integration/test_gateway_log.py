"""The gateway on a real broker: what harnesses saw the end of is on the log, in order, once."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polar.gateway.spool import Spool
from polar.kafka.reader import read_all
from schemas.calls import CallRecord, SessionOpened, SessionSealed
from schemas.nodes import GatewayHeartbeat
from schemas.topics import CALLS, NODES
from tests.unit.gateway.fake_engine import running_engine
from tests.unit.gateway.running import eventually, question, running_gateway

if TYPE_CHECKING:
    from polar.kafka.brokers import OwnBroker
    from polar.settings import LogSettings

pytestmark = pytest.mark.kafka

SESSIONS = [f"task/{number}/0/1" for number in range(6)]


async def test_sessions_lie_on_the_log_as_they_happened(log_settings: "LogSettings", tmp_path: Path) -> None:
    async with running_engine() as engine:
        async with running_gateway(tmp_path, engine.url, real_log=log_settings) as gateway:
            keys = await asyncio.gather(*(gateway.open(session_id) for session_id in SESSIONS))

            async def talk(key: str) -> None:
                messages = question()["messages"]
                for turn in range(3):
                    status, body, _ = await gateway.chat(key, {"messages": messages})
                    assert status == 200
                    messages += [body["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
                assert (await gateway.stream(key))[-1] == "[DONE]"

            await asyncio.gather(*map(talk, keys))
            counts = await asyncio.gather(*(gateway.seal(session_id) for session_id in SESSIONS))
            assert counts == [4] * len(SESSIONS)
            await eventually(lambda: gateway.parts.trouble is None)
        spool = Spool(tmp_path / "gateway" / "gateway-0")
        assert spool.num_records == 0
        spool.close()

    records = await read_all(log_settings, CALLS)
    for session_id in SESSIONS:
        mine = [record.event for record in records if record.key == session_id]
        kinds = [type(event) for event in mine]
        assert kinds == [SessionOpened, *[CallRecord] * 4, SessionSealed]
        calls = [event for event in mine if isinstance(event, CallRecord)]
        assert [call.seq for call in calls] == [1, 2, 3, 4]
        assert [call.prompt.base_call for call in calls[:3]] == [None, 1, 2]
    beats = [r.event for r in await read_all(log_settings, NODES) if isinstance(r.event, GatewayHeartbeat)]
    assert beats
    assert {beat.gateway_id for beat in beats} == {"gateway-0"}


async def test_a_broker_killed_in_the_middle_costs_no_record_and_no_answer(
    embedded_broker: "OwnBroker", embedded_log_settings: "LogSettings", tmp_path: Path
) -> None:
    from tests.brokers import kill

    async with (
        running_engine() as engine,
        running_gateway(tmp_path, engine.url, real_log=embedded_log_settings) as gateway,
    ):
        key = await gateway.open(SESSIONS[0])
        for _ in range(3):
            assert (await gateway.chat(key))[0] == 200
        killing = asyncio.create_task(asyncio.to_thread(kill, embedded_broker))
        answered = 3
        while not killing.done():
            assert (await gateway.chat(key))[0] == 200
            answered += 1
        await killing
        assert await gateway.seal(SESSIONS[0]) == answered
        await eventually(lambda: gateway.parts.spool.num_records == 0, 60.0)

    records = await read_all(embedded_log_settings, CALLS)
    events = [record.event for record in records if record.key == SESSIONS[0]]
    assert isinstance(events[0], SessionOpened)
    assert isinstance(events[-1], SessionSealed)
    seqs = [event.seq for event in events if isinstance(event, CallRecord)]
    assert list(dict.fromkeys(seqs)) == list(range(1, answered + 1))
