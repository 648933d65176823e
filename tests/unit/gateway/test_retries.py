"""The same request again: joined, answered once more, or a call of its own, and never two truths."""

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest

from polar.core.dialects.chat import ChatDialect
from polar.gateway import answers
from schemas.calls import Delivery
from tests.unit.gateway.fake_engine import Answer, Connection, FakeEngine
from tests.unit.gateway.running import (
    SESSION,
    RunningGateway,
    eventually,
    parse_events,
    question,
    running_gateway,
)


class Turnstile:
    """An engine that says one chunk and waits for `go_on` before the rest; each call has its own text."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.go_on = asyncio.Event()
        engine.talk = self.talk

    async def talk(self, connection: Connection, body: dict[str, Any]) -> None:
        self.engine.text = f"answer {len(self.engine.requests)}"
        if not body["stream"]:
            answer = self.engine.answer(body)
            left = asyncio.ensure_future(connection.until_closed())
            going = asyncio.ensure_future(self.go_on.wait())
            await asyncio.wait({left, going}, return_when=asyncio.FIRST_COMPLETED)
            going.cancel()
            if left.done():
                self.engine.closed_early += 1
                return
            left.cancel()
            await connection.json(answer)
            return
        first, *rest = self.engine.chunks(body)
        await connection.head(200, "text/event-stream", None)
        await connection.event(first)
        await self.go_on.wait()
        for chunk in rest:
            await connection.event(chunk)
        await connection.end_chunks()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_equal_request_joins_the_call_under_way(
    gateway: RunningGateway, engine: FakeEngine, *, stream: bool
) -> None:
    key = await gateway.open()
    turnstile = Turnstile(engine)

    async def ask() -> bytes:
        headers = {"Authorization": f"Bearer {key}"}
        async with gateway.http.post(
            f"{gateway.url}/v1/chat/completions", json=question(stream=stream), headers=headers
        ) as response:
            assert response.status == 200
            return await response.read()

    first = asyncio.create_task(ask())
    await eventually(lambda: len(engine.requests) == 1)
    others = [asyncio.create_task(ask()) for _ in range(2)]
    await eventually(lambda: gateway.parts.retries.num_joined == 2)
    turnstile.go_on.set()
    answers = await asyncio.gather(first, *others)
    assert len(set(answers)) == 1
    assert b"answer 1" in answers[0] or parse_events(answers[0])[-1] == "[DONE]"
    assert len(engine.requests) == 1
    (record,) = gateway.log.calls()
    assert record.delivery is Delivery.DELIVERED
    assert await gateway.seal() == 1


async def test_a_call_goes_on_for_who_joined_when_its_first_client_leaves(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    key = await gateway.open()
    turnstile = Turnstile(engine)
    first = asyncio.create_task(gateway.stream(key))
    await eventually(lambda: len(engine.requests) == 1)
    second = asyncio.create_task(gateway.stream(key))
    await eventually(lambda: gateway.parts.retries.num_joined == 1)
    first.cancel()
    await asyncio.wait({first})
    await asyncio.sleep(0.05)
    assert gateway.parts.sessions.num_in_flight == 1
    turnstile.go_on.set()
    assert (await second)[-1] == "[DONE]"
    (record,) = gateway.log.calls()
    assert (record.delivery, record.answer["content"]) == (Delivery.DELIVERED, "answer 1")


async def test_a_call_ends_when_all_who_wait_for_it_left(gateway: RunningGateway, engine: FakeEngine) -> None:
    key = await gateway.open()
    Turnstile(engine)
    calls = [asyncio.create_task(gateway.chat(key))]
    await eventually(lambda: len(engine.requests) == 1)
    calls.append(asyncio.create_task(gateway.chat(key)))
    await eventually(lambda: gateway.parts.retries.num_joined == 1)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await eventually(lambda: engine.closed_early == 1, 1.0)
    await eventually(lambda: gateway.parts.sessions.num_in_flight == 0, 1.0)
    # What was cut off is no answer: the same request is a call of its own.
    engine.talk = None
    assert (await gateway.chat(key))[0] == 200
    assert [record.delivery for record in gateway.log.calls()] == [
        Delivery.CLIENT_ABORTED,
        Delivery.DELIVERED,
    ]


async def lose_the_end(gateway: RunningGateway, key: str, body: dict[str, Any]) -> None:
    """Leave while the answer is whole and only its record is on its way to the broker."""
    gateway.log.gate.clear()
    call = asyncio.create_task(gateway.chat(key, body))
    await eventually(lambda: gateway.parts.spool.num_records == 1)
    call.cancel()
    await asyncio.wait({call})
    (entry,) = gateway.parts.retries._by_session[SESSION].values()
    await eventually(lambda: not entry.answer._clients)
    gateway.log.gate.set()
    await eventually(lambda: gateway.parts.spool.num_records == 0)


async def test_an_answer_that_was_lost_on_its_way_is_given_again(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engine.url, broker_grace_ms=60_000) as gateway:
        key = await gateway.open()
        await lose_the_end(gateway, key, question("a"))
        engine.text = "another sample"
        status, body, _ = await gateway.chat(key, question("a"))
        assert (status, body["choices"][0]["message"]["content"]) == (200, "ok")
        assert len(engine.requests) == len(gateway.log.calls()) == 1
        assert gateway.parts.retries.num_repeated == 1
        # Now it is delivered: the same request again wants another sample.
        _, body, _ = await gateway.chat(key, question("a"))
        assert body["choices"][0]["message"]["content"] == "another sample"
        assert await gateway.seal() == 2


async def test_a_retry_that_its_sdk_marks_gets_the_answer_that_it_lost(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    key = await gateway.open()
    marked = {"x-stainless-retry-count": "1"}
    _, first, _ = await gateway.chat(key, question("a"), **{"x-stainless-retry-count": "0"})
    engine.text = "second"
    assert (await gateway.chat(key, question("a"), **marked))[1] == first
    _, second, _ = await gateway.chat(key, question("a"), **{"x-stainless-retry-count": "0"})
    assert second["choices"][0]["message"]["content"] == "second"
    assert (await gateway.chat(key, question("a"), **marked))[1] == second
    # The latest attempt failed: its retry is no retry of the answers before.
    engine.text = "third"
    engine.script = [Answer(500, json={"error": {"message": "boom"}})]
    assert (await gateway.chat(key, question("a")))[0] == 502
    _, third, _ = await gateway.chat(key, question("a"), **marked)
    assert third["choices"][0]["message"]["content"] == "third"
    assert [r.delivery for r in gateway.log.calls()].count(Delivery.DELIVERED) == 3


async def test_what_differs_is_not_merged(gateway: RunningGateway, engine: FakeEngine) -> None:
    turnstile = Turnstile(engine)
    key = await gateway.open()
    other = await gateway.open("task/1/0/1")
    calls = [
        asyncio.create_task(gateway.chat(key, question(seed=1))),
        asyncio.create_task(gateway.chat(key, question(seed=2))),
        asyncio.create_task(gateway.chat(other, question(seed=1))),
        asyncio.create_task(gateway.chat(key, question(seed=1, n=2))),
    ]
    await eventually(lambda: len(engine.requests) == 4)
    turnstile.go_on.set()
    assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * 4
    assert await gateway.seal() == 4


async def test_merging_can_be_switched_off(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engine.url, retry_seconds=0) as gateway:
        key = await gateway.open()
        turnstile = Turnstile(engine)
        calls = [asyncio.create_task(gateway.chat(key)) for _ in range(3)]
        await eventually(lambda: len(engine.requests) == 3)
        turnstile.go_on.set()
        await asyncio.gather(*calls)
        assert gateway.parts.retries.num_kept == 0
        assert await gateway.seal() == 3


async def test_what_is_kept_is_bounded_in_bytes_and_age(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engine.url, retry_max_bytes=6000, retry_seconds=60) as gateway:
        retries = gateway.parts.retries
        key = await gateway.open()
        for number in range(20):
            assert (await gateway.chat(key, question(str(number))))[0] == 200
            await eventually(lambda: retries.kept_bytes <= 6000)
        assert 1 < retries.num_kept < 10
        # One that alone is too large is passed on, and not kept.
        engine.text = "x" * 500
        events = await gateway.stream(key)
        assert len(events) > 500
        assert retries.kept_bytes < 6000
        marked = {"x-stainless-retry-count": "1"}
        before = len(engine.requests)
        engine.text = "ok"
        await gateway.chat(key, question("0"), **marked)  # the oldest went first
        assert len(engine.requests) == before + 1
        retries.max_seconds = 0.001
        await asyncio.sleep(0.01)
        await gateway.chat(key, question("0"), **marked)
        assert len(engine.requests) == before + 2
        assert retries.num_kept == 1
        await gateway.seal()
        assert (retries.num_kept, retries.kept_bytes) == (0, 0)


async def test_a_slow_reader_slows_its_engine_and_nothing_else(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    key = await gateway.open()
    said = 0

    async def talk(connection: Connection, body: dict[str, Any]) -> None:
        nonlocal said
        first, second, *_ = engine.chunks(body)
        second["choices"][0]["delta"]["content"] = "x" * 100_000
        await connection.head(200, "text/event-stream", None)
        await connection.event(first)
        for said in range(400):  # noqa: B007
            await connection.event(second)
        await connection.end_chunks()

    engine.talk = talk
    headers = {"Authorization": f"Bearer {key}"}
    async with gateway.http.post(
        f"{gateway.url}/v1/chat/completions", json=question(stream=True), headers=headers
    ) as response:
        await response.content.readline()
        seen = -1
        while seen != said:  # until nothing moves any more
            seen = said
            await asyncio.sleep(0.3)
        assert said < 399
        engine.talk = None
        assert (await gateway.chat(key, question("meanwhile")))[0] == 200
        response.close()
    await eventually(lambda: gateway.parts.sessions.num_in_flight == 0)


def test_kept_answers_take_no_more_memory_than_is_counted() -> None:
    counted = []
    kept = [answers.Answer(ChatDialect(), is_stream=False) for _ in range(100)]
    tracemalloc.start()
    try:
        for number, answer in enumerate(kept):
            answer.keep(lambda _, size: counted.append(size))
            answer.hold(orjson.dumps({"content": f"{number:06d}" * 2000}))
            answer.release()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.2 * sum(counted)
