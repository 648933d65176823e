"""Everything that goes wrong has a clear answer in OpenAI's shape, and loses nothing."""

import asyncio
import json
import time
from pathlib import Path

import openai
import pytest

from polar.gateway.responses import HttpError
from schemas.calls import Delivery
from tests.unit.gateway.fake_engine import Answer, FakeEngine, running_engine
from tests.unit.gateway.running import (
    SESSION,
    FakeLog,
    RunningGateway,
    eventually,
    parse_events,
    question,
    running_gateway,
)  # fmt: skip


def check_error(body: object, key: str = "") -> dict:
    """The error object of an OpenAI-shaped body that does not repeat the key."""
    assert isinstance(body, dict)
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert not key or key not in str(body)
    return error


async def test_keys_that_open_nothing(gateway: RunningGateway, engine: FakeEngine) -> None:
    good = await gateway.open()
    cases = {
        "invalid_api_key": [
            "sk-polar-abc.def",
            good[:-2] + "xx",
            "sk-openai",
            gateway.key(gateway_id="other"),
        ],
        "session_expired": [gateway.key(expires_at=time.time() - 1)],
        "session_not_open": [gateway.key("task/5/0/1")],
        "missing_api_key": [""],
    }
    for code, keys in cases.items():
        for key in keys:
            status, body, _ = await gateway.chat(key)
            assert status == 401
            assert check_error(body, key)["code"] == code
            if key:
                status, body, _ = await gateway.chat("", path=f"/s/{key}/v1/chat/completions")
                assert (status, check_error(body, key)["code"]) == (401, code)
    assert engine.requests == []
    assert gateway.log.calls() == []


async def test_a_sealed_session_takes_no_calls(gateway: RunningGateway) -> None:
    key = await gateway.open()
    await gateway.chat(key)
    assert await gateway.seal() == 1
    status, body, _ = await gateway.chat(key)
    assert (status, check_error(body)["code"]) == (401, "session_sealed")
    assert await gateway.seal() == 1
    (seal,) = gateway.log.seals()
    assert seal.calls == 1
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="sealed"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"{\"messages\": [", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"{}", "messages must be a list"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": ["hi"]}', "messages[0] must be an object"),
        (b'{"messages": [{"content": "hi"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 0}', "n must be"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stream": 1}', "stream must be a bool"),
        (b'{"messages": [{"role": "user", "content": ' + b"[" * 200 + b"]" * 200 + b"}]}", "nested deeper"),
    ],
)  # fmt: skip
async def test_a_broken_body_is_named(
    gateway: RunningGateway, engine: FakeEngine, raw: bytes, says: str
) -> None:
    key = await gateway.open()
    status, body, _ = await gateway.chat(key, raw=raw)
    assert status == 400
    assert says in check_error(body)["message"]
    assert engine.requests == []
    assert await gateway.seal() == 0


async def test_a_body_over_the_limit(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engine.url, max_request_bytes=1000) as gateway:
        key = await gateway.open()
        status, body, _ = await gateway.chat(key, question("x" * 1500))
        assert (status, check_error(body)["code"]) == (413, "request_too_large")
        status, _, _ = await gateway.chat(key, question("x" * 500))
        assert status == 200


async def test_unknown_urls_say_what_there_is(gateway: RunningGateway) -> None:
    key = await gateway.open()
    status, body, _ = await gateway.chat(key, path="/v1/completions")
    assert (status, check_error(body)["code"]) == (404, "unknown_url")
    async with gateway.http.get(f"{gateway.url}/s/{key}/v1/chat/completions") as response:
        assert response.status == 405
        assert check_error(await response.json(), key)["code"] == "method_not_allowed"


async def test_an_engine_that_goes_down_is_recorded_and_comes_back(tmp_path: Path) -> None:
    async with running_engine() as first:
        port = int(first.url.rsplit(":", 1)[1])
        async with running_gateway(tmp_path, first.url, probe_seconds=0.2) as gateway:
            key = await gateway.open()
            assert (await gateway.chat(key))[0] == 200
            first.talk = lambda connection, body: connection.until_closed()
            hanging = asyncio.create_task(gateway.chat(key))
            await eventually(lambda: len(first.requests) == 2)
            await first.stop()
            status, body, _ = await hanging
            assert status in (502, 503)
            check_error(body)
            await eventually(lambda: gateway.parts.engines.trouble is not None)
            status, body, headers = await gateway.chat(key)
            assert (status, check_error(body)["code"]) == (503, "engine_down")
            assert int(headers["Retry-After"]) > 0
            async with gateway.http.get(f"{gateway.url}/ready") as response:
                assert response.status == 503
                assert (await response.json())["reason"] == "engine_down"
            async with running_engine(port):
                await eventually(lambda: gateway.parts.engines.trouble is None)
                assert (await gateway.chat(key))[0] == 200
                deliveries = [record.delivery for record in gateway.log.calls()]
                assert deliveries == [Delivery.DELIVERED, Delivery.UPSTREAM_ERROR, Delivery.DELIVERED]
                assert await gateway.seal() == 3


async def test_an_engine_that_was_never_there(tmp_path: Path) -> None:
    async with running_engine() as engine:
        url = engine.url
    async with running_gateway(tmp_path, url, wait_ready=False) as gateway:
        key = await gateway.open()
        status, body, headers = await gateway.chat(key)
        assert (status, check_error(body)["code"]) == (503, "engine_down")
        assert "Retry-After" in headers


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ({"models": ["other"]}, "engine_serves_other_model"),
        ({"complete_ids": False}, "engine_incomplete_ids"),
        ({"processed_logprobs": False}, "engine_logprobs_mode"),
        ({"default_temperature": 0.6}, "engine_generation_config"),
        ({"weight_version": "42"}, "engine_weight_version"),
    ],
)
async def test_an_engine_that_records_would_lie_about_is_refused(
    engine: FakeEngine, tmp_path: Path, spoil: dict, reason: str
) -> None:
    good = {name: getattr(engine, name) for name in spoil}
    for name, value in spoil.items():
        setattr(engine, name, value)
    async with running_gateway(tmp_path, engine.url, wait_ready=False) as gateway:
        key = await gateway.open()
        await eventually(lambda: (gateway.parts.engines.trouble or ("",))[0] == reason)
        status, body, _ = await gateway.chat(key)
        assert (status, check_error(body)["code"]) == (503, reason)
        assert engine.requests == []
        for name, value in good.items():
            setattr(engine, name, value)
        await eventually(lambda: gateway.parts.engines.trouble is None)
        assert (await gateway.chat(key))[0] == 200


async def test_the_engines_refusals_keep_their_meaning(gateway: RunningGateway, engine: FakeEngine) -> None:
    key = await gateway.open()
    long = {
        "error": {"message": "The decoder prompt is longer than the maximum model length of 9", "code": 400}
    }
    engine.script = [
        Answer(400, json=long),
        Answer(400, json={"error": {"message": "max_tokens cannot be greater than max_model_len=9"}}),
        Answer(429, json={"error": {"message": "busy"}}),
        Answer(500, json={"error": {"message": "boom"}}),
        Answer(503, raw="starting"),
        Answer(200, raw="<html>"),
        Answer(200, json={"object": "error"}),
    ]
    seen = []
    for _ in range(7):
        status, body, headers = await gateway.chat(key)
        seen.append((status, check_error(body)["code"], "Retry-After" in headers))
    assert seen == [
        (400, "context_length_exceeded", False),
        (400, None, False),
        (429, "rate_limit_exceeded", True),
        (502, "engine_error", False),
        (503, "engine_unavailable", True),
        (502, "engine_answer", True),
        (502, "engine_answer", True),
    ]
    records = gateway.log.calls()
    assert [record.seq for record in records] == list(range(1, 8))
    assert all(record.delivery is Delivery.UPSTREAM_ERROR and record.error for record in records)
    assert records[1].messages.new or records[1].messages.base_call == 1


@pytest.mark.parametrize(("status", "seconds"), [(429, 1), (503, 1), (500, None), (401, None)])
def test_whoever_is_to_try_later_is_told_when(status: int, seconds: int | None) -> None:
    error = HttpError(status, "no", kind="some_error")
    assert error.api.retry_after == seconds
    assert ((b"retry-after", str(seconds).encode()) in error.headers) == (seconds is not None)


async def test_too_many_calls(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engine.url, max_in_flight=1) as gateway:
        key = await gateway.open()
        engine.script = [Answer(delay_s=5, json=engine.answer({"messages": [], "model": "m"}))]
        first = asyncio.create_task(gateway.chat(key))
        await eventually(lambda: len(engine.requests) == 1)
        status, body, headers = await gateway.chat(key, question("another"))
        assert (status, check_error(body)["code"], headers["Retry-After"]) == (429, "too_many_calls", "1")
        first.cancel()
        await eventually(lambda: gateway.parts.sessions.num_in_flight == 0)
        assert (await gateway.chat(key))[0] == 200


async def test_a_full_spool_refuses_and_recovers(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engine.url, spool_max_bytes=2000, broker_grace_ms=10) as gateway:
        key = await gateway.open()
        gateway.log.down = True
        while (answer := await gateway.chat(key))[0] == 200:
            assert gateway.parts.spool.num_records < 10
        status, body, headers = answer
        assert (status, check_error(body)["code"]) == (503, "spool_full")
        assert "Retry-After" in headers
        kept = gateway.parts.spool.num_records
        gateway.log.down = False
        await eventually(lambda: gateway.parts.spool.num_records == 0)
        assert len(gateway.log.calls()) == kept
        assert (await gateway.chat(key))[0] == 200


async def test_the_admin_api_is_closed_and_strict(gateway: RunningGateway) -> None:
    key = await gateway.open()
    for path in ("/admin/sessions/open", "/admin/sessions/seal", "/admin/engines/policy"):
        status, body = await gateway.admin("POST", path, {}, token=key)
        assert (status, check_error(body)["code"]) == (401, "invalid_admin_token")
        status, body = await gateway.admin("POST", path, {"unknown": 1})
        assert status == 400
        check_error(body)
    policy = {"engine_id": "nobody", "phase": "pending", "version": {"lineage": "a", "step": 1}}
    assert (await gateway.admin("POST", "/admin/engines/policy", policy))[0] == 404
    seal = {"session_id": "no session", "outcome": "completed", "reason": ""}
    assert (await gateway.admin("POST", "/admin/sessions/seal", seal))[0] == 400
    status, state = await gateway.admin("GET", "/admin/state")
    assert status == 200
    assert state["open_sessions"] == [SESSION]
    assert state["engines"]["engine-0"]["settled"] == "base:0"


async def test_opening_needs_the_broker(engine: FakeEngine, tmp_path: Path) -> None:
    log = FakeLog()
    log.down = True
    async with running_gateway(tmp_path, engine.url, log) as gateway:
        body = {"session_id": SESSION, "group_id": "task", "expires_at": time.time() + 60}
        status, answer = await gateway.admin("POST", "/admin/sessions/open", body)
        assert (status, check_error(answer)["code"]) == (503, "broker_down")
        async with gateway.http.get(f"{gateway.url}/ready") as response:
            assert (await response.json())["reason"] == "broker_down"
        log.down = False
        assert await gateway.admin("POST", "/admin/sessions/open", body) == (200, {"opened": True})
        assert len(log.opened()) == 1
        async with gateway.http.get(f"{gateway.url}/health") as response:
            assert response.status == 200
        await eventually(lambda: gateway.parts.trouble is None)
        async with gateway.http.get(f"{gateway.url}/ready") as response:
            assert response.status == 200


async def test_a_stream_that_broke_off_says_so_in_words_that_harnesses_try_again_after(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    """Programs match `connection error`, a code with `unavailable`, or the presence of a request id."""
    key = await gateway.open()
    chunks = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in engine.chunks(question())[:2]]
    engine.script.append(Answer(writes=chunks, end="reset"))
    headers = {"Authorization": f"Bearer {key}"}
    async with gateway.http.post(
        f"{gateway.url}/v1/chat/completions", json=question(stream=True), headers=headers
    ) as response:
        events = parse_events(await response.read())
        assert response.headers["X-Request-Id"] == f"{SESSION}#1"
    error = check_error(events[-1], key)
    assert error["code"] == "engine_unavailable"
    assert error["message"].startswith("upstream connection error: ")
