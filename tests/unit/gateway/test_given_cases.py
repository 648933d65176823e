"""The given fault cases of all dialects, played through a gateway.

Names of the cases' vocabulary are mapped here and nowhere else. What a call is for is decided when
its session is stitched, so that is asked here too.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polar.core.call_kinds import decide_kinds
from polar.core.call_usability import UsabilityRules
from schemas.base import encode
from schemas.calls import CallRecord, Delivery
from tests.unit.core.given_cases import Case, cases
from tests.unit.gateway.fake_engine import Answer, FakeEngine, running_engine
from tests.unit.gateway.running import SESSION, RunningGateway, eventually, running_gateway
from tests.unit.gateway.seen import Seen

TRAINED_KINDS = UsabilityRules().train_kinds
FINISHED = ("stop", "length", "tool_calls")
REPEATS = 3
"""Cases ask for up to 50 repetitions of one exchange; the soak test does that."""


@pytest.fixture
async def world(tmp_path: Path, case: Case) -> AsyncIterator[tuple[FakeEngine, RunningGateway]]:
    name = case["given"]["config"]["upstream_reasoning_field"]
    async with (
        running_engine() as engine,
        running_gateway(tmp_path, engine.url, reasoning_field=name) as gateway,
    ):
        yield engine, gateway


def scripted(answer: dict[str, Any]) -> Answer:
    writes = answer.get("sse")
    if "hex" in answer:
        data = [bytes.fromhex(text) for text in answer["hex"]]
    else:
        data = None if writes is None else [text.encode() for text in writes]
    return Answer(
        answer["status"], answer["delay_s"], answer.get("json"), answer.get("raw"), data, answer["end"]
    )  # fmt: skip


async def perform(gateway: RunningGateway, key: str, exchange: dict[str, Any]) -> Seen | None:
    """Play one exchange; what the client saw, or None when it left."""
    leaves = exchange["client_disconnect"]
    request = exchange["request"]
    async with gateway.http.post(
        gateway.url + request["path"], json=request["body"], headers={"Authorization": f"Bearer {key}"}
    ) as response:
        if leaves and leaves["when"].startswith("after_"):
            seen = b""
            last = f"event: {leaves.get('event')}\n".encode()
            async for data in response.content.iter_any():
                seen += data
                if leaves["when"] == "after_chunk" or b'"finish_reason":"stop"' in seen or last in seen:
                    break
            if leaves["when"] != "after_chunk":
                # What ends the answer came: its record is on the log by then.
                assert len(gateway.log.calls()) == 1
            response.close()
            return None
        return Seen(exchange["dialect"], response.status, await response.read(), response.headers)


async def play(gateway: RunningGateway, engine: FakeEngine, case: Case) -> list[Seen | None]:
    """Play all exchanges: one after the other, except where one begins before another can have ended."""
    key = await gateway.open()
    exchanges = case["given"]["exchanges"] * min(case["expect"].get("repeat", 1), REPEATS)
    seen: list[asyncio.Task[Seen | None]] = []
    busy_until = began_at = 0.0
    for exchange in exchanges:
        if exchange["t"] < busy_until:
            await asyncio.sleep(exchange["t"] - began_at)
        else:
            await asyncio.gather(*seen)
        began_at = exchange["t"]
        busy_until = max(busy_until, began_at + sum(answer["delay_s"] for answer in exchange["upstream"]))
        if exchange["client_disconnect"]:
            busy_until = 0.0
        engine.script += [scripted(answer) for answer in exchange["upstream"]]
        seen.append(asyncio.create_task(attempt(gateway, engine, key, exchange)))
    await asyncio.gather(*seen)
    return [task.result() for task in seen]


async def attempt(
    gateway: RunningGateway, engine: FakeEngine, key: str, exchange: dict[str, Any]
) -> Seen | None:
    """One exchange, whose client may leave before anything comes."""
    leaves = exchange["client_disconnect"]
    asked = len(engine.requests)
    performing = asyncio.create_task(perform(gateway, key, exchange))
    if leaves and leaves["when"] == "before_first_byte":
        # Counted from where its request has come to: a busy machine may take longer until then.
        await eventually(lambda: len(engine.requests) > asked)
        await asyncio.sleep(leaves["after_s"])
        performing.cancel()
    try:
        async with asyncio.timeout(60):
            return await performing
    except (asyncio.CancelledError, aiohttp.ClientError):
        assert leaves
        return None


def check_response(seen: Seen, expected: dict[str, Any]) -> None:
    if "status" in expected:
        assert seen.status == expected["status"]
    if "status_in" in expected:
        assert seen.status in expected["status_in"]
    if "content" in expected:
        assert seen.content == expected["content"]
    if "terminal" in expected:
        assert seen.terminal in expected["terminal"].split("_or_")
    if expected.get("must_not_contain_terminal"):
        assert not seen.ended_well
    assert all(text in seen.text for text in expected.get("must_contain", ()))
    assert not any(text in seen.text for text in expected.get("must_not_contain", ()))
    if "usage_visible" in expected:
        assert any(event.get("usage") for event in seen.events) == expected["usage_visible"]
    if "usage_fields" in expected:
        assert set(expected["usage_fields"]) <= seen.body["usage"].keys()
    if "tool_calls" in expected:
        assert seen.tool_calls == expected["tool_calls"]
    for item in expected.get("output_items", ()):
        assert any(item.items() <= known.items() for known in seen.body["output"])
    assert set(expected.get("headers_present", ())) <= seen.headers
    if "error_type" in expected:
        assert seen.body["error"]["type"] == expected["error_type"]
    if "error_code_or_type" in expected:
        error = seen.body["error"]
        assert expected["error_code_or_type"] in (error.get("code"), error["type"])
    if "choices" in expected:
        assert len(seen.body["choices"]) == expected["choices"]


def is_usable(record: CallRecord, kind: str = "agent") -> bool:
    return (
        record.delivery is Delivery.DELIVERED
        and kind in TRAINED_KINDS
        and record.untrainable is None
        and record.finish_reason in FINISHED
        and len(record.sampled_ids) > 0
    )


def logical_calls(records: list[CallRecord]) -> int:
    """A call that was not delivered and came again is one call."""
    again = [record.request_digest for record in records]
    return sum(
        record.delivery is Delivery.DELIVERED or record.request_digest not in again[place + 1 :]
        for place, record in enumerate(records)
    )


def check_record(record: CallRecord, expected: dict[str, Any], kind: str = "agent") -> None:
    if "kind" in expected:
        assert kind == expected["kind"]
    if "completion_ids" in expected:
        ids = record.sampled_ids.tolist()
        if expected.get("ids_prefix_ok"):
            assert expected["completion_ids"] == ids[: len(expected["completion_ids"])]
        else:
            assert ids == expected["completion_ids"]
    if "finish_reason" in expected:
        known = (*FINISHED, "abort", "error")
        assert (record.finish_reason if record.finish_reason in known else "unknown") == expected[
            "finish_reason"
        ]
    if "delivery" in expected:
        assert record.delivery == expected["delivery"]
    assert is_usable(record, kind) == expected["usable"]
    if "reason" in expected:
        assert record.untrainable == expected["reason"]
    if "logprobs" in expected:
        assert record.logprobs.tolist() == pytest.approx(expected["logprobs"])
    if "prompt_ids" in expected:
        assert record.prompt.new_ids.tolist() == expected["prompt_ids"]
    if "bad_logprob_positions" in expected:
        bad = [i for i, value in enumerate(record.logprobs) if math.isnan(value)]
        assert bad == expected["bad_logprob_positions"]
    if "usage" in expected:
        assert record.usage is not None
        assert record.usage.model_dump().items() >= expected["usage"].items()
    if "response_tool_calls" in expected:
        calls = [{"id": c["id"], **c["function"]} for c in record.answer["tool_calls"]]
        assert calls == expected["response_tool_calls"]
    if "raw_contains" in expected:
        assert expected["raw_contains"] in encode(record).decode()
    for check in expected.get("request_checks", ()):
        assert pointer({"messages": record.messages.new}, check["pointer"]) == check["equals"]


def pointer(value: Any, path: str) -> Any:
    for part in path.split("/")[1:]:
        value = value[part] if isinstance(value, dict) else value[int(part)]
    return value


def check_sent(body: dict[str, Any], check: dict[str, Any]) -> None:
    """What the engine got."""
    if "equal_pointers" in check:
        left, right = (pointer(body, path) for path in check["equal_pointers"])
        assert left == right
        return
    value = pointer(body, check["pointer"])
    text = json.dumps(value, ensure_ascii=False)
    assert value == check.get("equals", value)
    assert check.get("contains", "") in text
    assert "not_contains" not in check or check["not_contains"] not in text


@pytest.mark.parametrize("case", cases("gateway"))
async def test_given_case(world: tuple[FakeEngine, RunningGateway], case: Case) -> None:
    engine, gateway = world
    seen = await play(gateway, engine, case)
    expect = case["expect"]
    if "one_of" in expect:
        # Of the accepted outcomes ours: what is not known is refused by name, before dispatch.
        (expect,) = [one for one in expect["one_of"] if one["status"] == 400]
        expect = {"responses": [expect], "upstream_requests": 0}
    await eventually(
        lambda: gateway.parts.sessions.num_in_flight == 0 and gateway.parts.spool.num_records == 0
    )
    records = gateway.log.calls(SESSION)

    for one, expected in zip(seen, expect.get("responses", ()), strict=False):
        if one is not None and expected is not None:
            check_response(one, expected)
    kinds = decide_kinds(records)
    for record, expected in zip(records, expect.get("records", ()), strict=False):
        check_record(record, expected, kinds[record.seq].kind)
    for record in records if "records_all" in expect else ():
        check_record(record, expect["records_all"])
    for check in expect.get("upstream_checks", ()):
        check_sent(engine.requests[check["request"]], check)
    for one, other in expect.get("equal_upstream_system", ()):
        assert engine.requests[one]["messages"][0] == engine.requests[other]["messages"][0]
    if "repeat" in expect:
        assert len(records) == REPEATS
        await eventually(lambda: engine.closed_early == REPEATS, 2.0)
    elif "record_count" in expect:
        assert len(records) == expect["record_count"]
    if "upstream_requests" in expect:
        assert len(engine.requests) == expect["upstream_requests"]
    if "logical_calls" in expect:
        assert logical_calls(records) == expect["logical_calls"]
    if "alarms" in expect:
        assert expect["alarms"] == ["capture_rate_zero"]
        assert gateway.parts.metrics()["capture_alarms_total"] == 1
    if "usable_records" in expect:
        assert sum(map(is_usable, records)) == expect["usable_records"]
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
