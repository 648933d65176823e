"""Streams that are quiet for long: a sign of life in time, and a refusal before it keeps its status."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from polar.core.dialects.chat import ChatDialect
from polar.gateway.answers import Answer as SharedAnswer
from polar.gateway.http_protocol import Connection
from schemas.calls import Delivery
from schemas.policies import PolicyVersion
from tests.unit.gateway.fake_engine import Answer, FakeEngine
from tests.unit.gateway.fake_engine import Connection as EngineConnection
from tests.unit.gateway.running import RunningGateway, eventually, question, running_gateway, within

SIGN = b": keep-alive"


@pytest.fixture
async def quick(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway that gives signs of life after 50 ms."""
    async with running_gateway(tmp_path, engine.url, keep_alive_seconds=0.05) as gateway:
        yield gateway


async def ask(gateway: RunningGateway, key: str, **fields: Any) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {key}"}
    async with gateway.http.post(
        f"{gateway.url}/v1/chat/completions", json=question(**fields), headers=headers
    ) as response:
        return response.status, await response.read()


async def test_signs_of_life_come_before_and_inside_a_quiet_stream(
    quick: RunningGateway, engine: FakeEngine
) -> None:
    async def talk(connection: EngineConnection, body: dict[str, Any]) -> None:
        await asyncio.sleep(0.2)
        await connection.head(200, "text/event-stream", None)
        first, *rest = engine.chunks(body)
        await connection.event(first)
        await asyncio.sleep(0.2)
        for chunk in rest:
            await connection.event(chunk)
        await connection.end_chunks()

    engine.talk = talk
    status, data = await ask(quick, await quick.open(), stream=True)
    assert status == 200
    blocks = data.split(b"\n\n")
    assert blocks[0] == SIGN
    content = next(i for i, block in enumerate(blocks) if block.startswith(b"data:"))
    assert SIGN in blocks[content + 1 :]
    assert blocks[-2] == b"data: [DONE]"
    assert all(block in (SIGN, b"") or block.startswith(b"data: ") for block in blocks)
    await eventually(lambda: quick.parts.metrics()["keep_alives_total"] == blocks.count(SIGN))


async def test_a_refusal_keeps_its_status_unless_a_sign_of_life_was_sent(
    quick: RunningGateway, engine: FakeEngine
) -> None:
    key = await quick.open()
    busy = {"error": {"message": "busy"}}
    engine.script = [Answer(429, json=busy), Answer(429, json=busy, delay_s=0.2)]
    status, data = await ask(quick, key, stream=True)
    assert (status, b"rate_limit" in data) == (429, True)
    status, data = await ask(quick, key, stream=True)
    assert status == 200
    assert data.startswith(SIGN)
    assert b"rate_limit" in data
    assert b"[DONE]" not in data
    assert [record.delivery for record in quick.log.calls()] == [Delivery.UPSTREAM_ERROR] * 2


async def test_a_call_that_waits_for_an_engine_gives_signs_of_life(
    quick: RunningGateway, engine: FakeEngine
) -> None:
    key = await quick.open()
    version = PolicyVersion(lineage="run", step=1)
    quick.parts.engines.tell("engine-0", "pending", version)
    call = asyncio.create_task(ask(quick, key, stream=True))
    await eventually(lambda: quick.parts.engines.num_waiting == 1)
    await asyncio.sleep(0.2)
    assert engine.requests == []
    quick.parts.engines.tell("engine-0", "settled", version)
    status, data = await call
    assert (status, data[: len(SIGN)]) == (200, SIGN)
    assert data.endswith(b"data: [DONE]\n\n")


async def test_a_whole_answer_is_only_itself(quick: RunningGateway, engine: FakeEngine) -> None:
    engine.token_seconds = 0.2
    status, data = await ask(quick, await quick.open())
    assert status == 200
    assert data.startswith(b"{")


@pytest.mark.parametrize(
    ("stream", "begun"), [(False, False), (True, False), (True, True)], ids=["whole", "quiet", "begun"]
)
async def test_a_client_that_leaves_ends_its_call_within_a_second(
    quick: RunningGateway, engine: FakeEngine, *, stream: bool, begun: bool
) -> None:
    """Also one that already got signs of life, or a part of its answer."""
    key = await quick.open()
    chunk = b"data: " + orjson.dumps(engine.chunks(question())[0]) + b"\n\n"
    engine.script = [Answer(writes=[chunk], end="hang") if begun else Answer(delay_s=60, json={})]
    call = asyncio.create_task(ask(quick, key, stream=stream))
    await eventually(lambda: len(engine.requests) == 1)
    await asyncio.sleep(0.2)
    call.cancel()
    assert await within(lambda: engine.closed_early == 1, 1.0)
    assert await within(quick.log.calls, 1.0)
    assert quick.log.calls()[0].delivery is Delivery.CLIENT_ABORTED


async def test_a_client_that_leaves_while_its_call_waits_for_an_engine_ends_the_wait(
    quick: RunningGateway,
) -> None:
    key = await quick.open()
    quick.parts.engines.tell("engine-0", "pending", PolicyVersion(lineage="run", step=1))
    call = asyncio.create_task(ask(quick, key, stream=True))
    await eventually(lambda: quick.parts.engines.num_waiting == 1)
    call.cancel()
    assert await within(lambda: quick.parts.engines.num_waiting == 0, 1.0)
    assert await quick.seal() == 0


class Headers(ChatDialect):
    """A dialect whose clients tolerate nothing between the events."""

    keep_alive = b""


async def test_where_clients_tolerate_nothing_only_headers_are_sent() -> None:
    sent: list[dict[str, Any]] = []
    answer = SharedAnswer(Headers(), is_stream=True)

    async def send(message: Any) -> None:
        sent.append(dict(message))

    delivering = asyncio.create_task(answer.deliver(Connection(), send, 0.02))
    await eventually(lambda: answer.keep_alives >= 2, 5.0)
    assert [message["type"] for message in sent] == ["http.response.start"]
    await answer.write(b"data: 1\n\n")
    answer.hold(b"data: 2\n\n")
    answer.release()
    await delivering
    assert b"".join(message.get("body", b"") for message in sent) == b"data: 1\n\ndata: 2\n\n"
    assert [message["more_body"] for message in sent[1:]][-1] is False
