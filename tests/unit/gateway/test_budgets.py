"""A session's budget ends it so that harnesses stop; limits above what is possible are lowered."""

import time
from pathlib import Path
from typing import Any

import pytest

from schemas.tasks import LimitSpec
from tests.unit.gateway.fake_engine import CLOSE, FakeEngine
from tests.unit.gateway.running import SESSION, RunningGateway, question, running_gateway


def spent(answer: tuple[int, Any, dict[str, str]]) -> bool:
    """Whether it says, in a way that no harness tries again, that the budget is spent."""
    status, body, headers = answer
    if status == 200:
        return False
    assert (status, body["error"]["code"]) == (401, "session_budget_exhausted")
    assert "Retry-After" not in headers
    return True


async def test_calls_are_counted_with_their_choices(gateway: RunningGateway, engine: FakeEngine) -> None:
    key = await gateway.open(limits=LimitSpec(max_calls=3))
    assert not spent(await gateway.chat(key, question("a")))
    assert spent(await gateway.chat(key, question("three more", n=3)))
    assert not spent(await gateway.chat(key, question("two more", n=2)))
    assert spent(await gateway.chat(key, question("b")))
    assert len(engine.requests) == 2
    assert await gateway.seal() == 3


async def test_sampled_tokens_are_counted_over_a_restart(engine: FakeEngine, tmp_path: Path) -> None:
    limits = LimitSpec(max_sampled_tokens=8)
    async with running_gateway(tmp_path, engine.url) as gateway:
        await gateway.open()
        key = gateway.key(limits=limits)
        assert not spent(await gateway.chat(key, question("a")))
        assert len(gateway.log.calls()[0].sampled_ids) == len([*b"ok", CLOSE]) == 3
    async with running_gateway(tmp_path, engine.url) as gateway:
        key = gateway.key(limits=limits)
        assert not spent(await gateway.chat(key, question("b", max_tokens=100)))
        assert not spent(await gateway.chat(key, question("c", max_tokens=1)))
        assert spent(await gateway.chat(key, question("d")))
    assert [body.get("max_tokens") for body in engine.requests] == [8, 5, 1]
    assert gateway.log.calls(SESSION)[0].sampling_used["max_tokens"] == 5


async def test_seconds_end_the_calls_and_not_the_key(gateway: RunningGateway) -> None:
    await gateway.open()
    limits = LimitSpec(max_seconds=60)
    assert not spent(await gateway.chat(gateway.key(limits=limits, calls_end_at=time.time() + 60)))
    assert spent(await gateway.chat(gateway.key(limits=limits, calls_end_at=time.time() - 1)))


@pytest.mark.parametrize(
    ("asked", "sent"), [(32_000, 4096), (4096, 4096), (100, 100), (None, None), (True, True), ("9", "9")]
)
async def test_a_limit_beyond_the_context_is_lowered(
    gateway: RunningGateway, engine: FakeEngine, asked: Any, sent: Any
) -> None:
    key = await gateway.open()
    assert (await gateway.chat(key, question(max_tokens=asked)))[0] == 200
    assert engine.requests[0].get("max_tokens") == sent
    (record,) = gateway.log.calls()
    assert record.sampling_used.get("max_tokens") == sent
    assert record.sampling_asked.get("max_tokens") == asked
