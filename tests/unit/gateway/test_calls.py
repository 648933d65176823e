"""A call through the gateway: what the harness sees, what the engine gets, what is recorded."""

import asyncio
import math
from pathlib import Path

import openai
import pytest

from polar.core.call_usability import Rebuilt, UsabilityRules, own_reason
from schemas.calls import Delivery
from schemas.policies import PolicyVersion
from schemas.tasks import SamplingSpec
from tests.unit.gateway.fake_engine import CLOSE, FakeEngine
from tests.unit.gateway.running import (
    SESSION,
    RunningGateway,
    content_of,
    eventually,
    question,
    running_gateway,
)


async def test_an_unstreamed_call_is_answered_clean_and_recorded_exactly(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    key = await gateway.open()
    status, body, _ = await gateway.chat(
        key, question("hi", temperature=0.1, top_p=0.5, seed=7, max_tokens=9)
    )

    assert status == 200
    assert body["choices"][0]["message"]["content"] == "ok"
    assert body["model"] == "any-name"
    text = str(body)
    assert "token_id" not in text
    assert "logprob" not in text

    (record,) = gateway.log.calls()
    assert record.call_id == f"{SESSION}#1"
    assert record.prompt.base_call is None
    assert record.prompt.new_ids.tolist() == [301, *b"hi", CLOSE, 302]
    assert record.sampled_ids.tolist() == [*b"ok", CLOSE]
    assert record.logprobs.tolist() == [-0.25, -0.5, -0.75]
    assert record.delivery is Delivery.DELIVERED
    assert record.untrainable is None
    assert record.finish_reason == "stop"
    assert record.answer == {"role": "assistant", "content": "ok"}
    assert record.policy.first == record.policy.last == PolicyVersion(lineage="base", step=0)
    assert record.sampling_asked == {"temperature": 0.1, "top_p": 0.5, "seed": 7, "max_tokens": 9}
    assert record.sampling_used["temperature"] == 1.0
    assert record.sampling_used["top_p"] == 1.0
    assert record.usage is not None
    assert record.usage.completion_tokens == 3

    (sent,) = engine.requests
    assert sent["temperature"] == 1.0
    assert sent["top_p"] == 1.0
    assert sent["max_tokens"] == 9
    assert "seed" not in sent
    assert engine.headers[0]["x-polar-purpose"] == "call"
    assert engine.headers[0]["x-polar-call"] == f"{SESSION}#1"


async def test_a_stream_flows_before_the_engine_has_finished(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    key = await gateway.open()
    go_on = asyncio.Event()

    async def talk(connection, body) -> None:
        await connection.head(200, "text/event-stream", None)
        first, *rest = engine.chunks(body)
        await connection.event(first)
        await go_on.wait()
        for chunk in rest:
            await connection.event(chunk)
        await connection.end_chunks()

    engine.talk = talk
    headers = {"Authorization": f"Bearer {key}"}
    async with gateway.http.post(
        f"{gateway.url}/v1/chat/completions", json=question(stream=True), headers=headers
    ) as response:
        first = await asyncio.wait_for(response.content.readline(), 2)
        assert b"assistant" in first
        assert b"token_ids" not in first
        assert not gateway.log.calls()
        go_on.set()
        rest = await response.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    (record,) = gateway.log.calls()
    assert record.stream
    assert record.sampled_ids.tolist() == [*b"ok", CLOSE]
    assert record.answer == {"role": "assistant", "content": "ok"}
    assert record.untrainable is None


async def test_the_end_of_an_answer_waits_for_the_log(gateway: RunningGateway) -> None:
    key = await gateway.open()
    gateway.log.gate.clear()
    call = asyncio.create_task(gateway.stream(key))
    await eventually(lambda: gateway.parts.spool.num_records == 1)
    assert not call.done()
    gateway.log.gate.set()
    events = await call
    assert events[-1] == "[DONE]"
    assert len(gateway.log.calls()) == 1


async def test_usage_shows_only_when_it_was_asked_for(gateway: RunningGateway) -> None:
    key = await gateway.open()
    without = await gateway.stream(key)
    with_usage = await gateway.stream(key, {"stream_options": {"include_usage": True}})
    assert not any(event.get("usage") for event in without[:-1])
    assert with_usage[-2]["usage"]["completion_tokens"] == 3
    assert [record.usage.completion_tokens for record in gateway.log.calls()] == [3, 3]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_sdk_works_with_key_and_with_prefix(
    gateway: RunningGateway, *, stream: bool
) -> None:
    key = await gateway.open()
    for base, api_key in ((f"{gateway.url}/v1", key), (f"{gateway.url}/s/{key}/v1", "unused")):
        async with openai.AsyncOpenAI(base_url=base, api_key=api_key, max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            if stream:
                chunks = await client.chat.completions.create(
                    model="gpt-x", messages=[{"role": "user", "content": "hi"}], stream=True
                )
                text = "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])
            else:
                answer = await client.chat.completions.create(
                    model="gpt-x", messages=[{"role": "user", "content": "hi"}]
                )
                text = answer.choices[0].message.content or ""
            assert text == "ok"
    assert [record.seq for record in gateway.log.calls()] == [1, 2]


async def test_a_conversation_is_recorded_as_deltas(gateway: RunningGateway) -> None:
    key = await gateway.open()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [{"role": "user", "content": "a long question " * 50}]
    await gateway.chat(key, {"messages": messages, "tools": tools})
    messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
    await gateway.chat(key, {"messages": messages, "tools": tools})

    first, second = gateway.log.calls()
    assert first.tools.tools == tuple(tools)
    assert second.tools.tools is None
    assert second.tools.digest == first.tools.digest
    assert second.prompt.base_call == 1
    assert second.prompt.kept == len(first.prompt.new_ids) + len(first.sampled_ids)
    assert second.prompt.new_ids.tolist() == [301, *b"more", CLOSE, 302]
    assert second.messages.base_call == 1
    assert second.messages.kept == 1
    assert [m["content"] for m in second.messages.new] == ["ok", "more"]


async def test_several_choices_are_several_numbered_calls(gateway: RunningGateway) -> None:
    key = await gateway.open()
    _, body, _ = await gateway.chat(key, question(n=2))
    events = await gateway.stream(key, {"n": 2})
    assert len(body["choices"]) == 2
    assert {c["index"] for e in events[:-1] for c in e["choices"]} == {0, 1}
    records = gateway.log.calls()
    assert [(r.seq, r.choice_index) for r in records] == [(1, 0), (2, 1), (3, 0), (4, 1)]
    assert all(r.untrainable is None and len(r.sampled_ids) == 3 for r in records)
    assert await gateway.seal() == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"structured_outputs": {"regex": "a+"}},
    ],
)
async def test_constrained_sampling_is_answered_and_marked(
    gateway: RunningGateway, engine: FakeEngine, fields: dict
) -> None:
    key = await gateway.open()
    status, _, _ = await gateway.chat(key, question(**fields))
    assert status == 200
    assert fields.items() <= engine.requests[0].items()
    assert gateway.log.calls()[0].untrainable == "constrained_sampling"


async def test_what_would_bend_the_distribution_unseen_is_left_out(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    key = await gateway.open(sampling=SamplingSpec(temperature=0.7, max_tokens=5))
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}
    await gateway.chat(
        key,
        question(
            logit_bias={"1": 5},
            top_k=3,
            min_tokens=4,
            parallel_tool_calls=False,
            tools=[strict],
            max_tokens=100,
            kv_transfer_params={"prompt_token_ids": [1]},
            presence_penalty=1.5,
            response_format={"type": "text"},
        ),
    )
    (sent,) = engine.requests
    assert (sent["temperature"], sent["top_k"], sent["presence_penalty"], sent["max_tokens"]) == (
        0.7,
        0,
        0.0,
        5,
    )
    assert not {"logit_bias", "min_tokens", "parallel_tool_calls", "kv_transfer_params"} & sent.keys()
    assert "strict" not in sent["tools"][0]["function"]
    (record,) = gateway.log.calls()
    assert record.untrainable is None
    assert record.sampling_asked["logit_bias"] == {"1": 5}
    assert record.sampling_used["temperature"] == 0.7


async def test_an_untrainable_session_keeps_the_harness_sampling(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    key = await gateway.open(trainable=False)
    await gateway.chat(key, question(temperature=0.2, top_k=5, seed=1))
    (sent,) = engine.requests
    assert (sent["temperature"], sent["top_k"], sent["seed"]) == (0.2, 5, 1)
    (record,) = gateway.log.calls()
    assert record.untrainable == "session_not_trainable"
    assert record.sampling_used["temperature"] == 0.2


async def test_a_calls_version_interval_spans_what_was_told_meanwhile(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    key = await gateway.open()
    finish = asyncio.Event()

    async def talk(connection, body) -> None:
        await finish.wait()
        await connection.json(engine.answer(body))

    engine.talk = talk

    async def tell(phase: str, step: int) -> None:
        body = {"engine_id": "engine-0", "phase": phase, "version": {"lineage": "run", "step": step}}
        assert await gateway.admin("POST", "/admin/engines/policy", body) == (200, {"ok": True})

    before = asyncio.create_task(gateway.chat(key))
    await eventually(lambda: len(engine.requests) == 1)
    await tell("pending", 1)
    # Nothing is sampled now: what waits for the new weights is sampled under them alone.
    during = asyncio.create_task(gateway.chat(key, question("during")))
    await eventually(lambda: gateway.parts.engines.num_waiting == 1)
    await tell("settled", 1)
    await eventually(lambda: len(engine.requests) == 2)
    after = asyncio.create_task(gateway.chat(key, question("after")))
    await eventually(lambda: len(engine.requests) == 3)
    finish.set()
    await asyncio.gather(before, during, after)
    intervals = {r.seq: (str(r.policy.first), str(r.policy.last)) for r in gateway.log.calls()}
    assert intervals == {1: ("base:0", "run:1"), 2: ("run:1", "run:1"), 3: ("run:1", "run:1")}
    assert {r.seq: r.open_calls for r in gateway.log.calls()} == {1: (), 2: (1,), 3: (1, 2)}


async def test_a_gateway_that_nobody_told_asks_the_engine(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    key = await gateway.open()
    engine.weight_version = "run:3"
    await gateway.chat(key)
    (record,) = gateway.log.calls()
    assert (str(record.policy.first), str(record.policy.last)) == ("base:0", "run:3")


async def test_reasoning_content_reaches_the_engine_as_reasoning(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    key = await gateway.open()
    history = [
        {"role": "assistant", "content": "A", "reasoning_content": "R"},
        {"role": "user", "content": "q"},
    ]
    await gateway.chat(key, {"messages": history})
    assert engine.requests[0]["messages"][0] == {"role": "assistant", "content": "A", "reasoning": "R"}
    assert gateway.log.calls()[0].messages.new[0]["reasoning"] == "R"


@pytest.mark.parametrize(
    ("kind", "mode", "reason"),
    [("vllm", "processed_logprobs", None), ("openai", "unverified", "logprob_semantics")],
)
async def test_records_say_which_log_probs_the_engine_was_seen_to_give(
    engine: FakeEngine, tmp_path: Path, kind: str, mode: str, reason: str | None
) -> None:
    """The second engine gives ids and log-probs, though nobody asked: that proves nothing."""
    async with running_gateway(tmp_path, engine.url, engine_kind=kind) as gateway:
        await gateway.chat(await gateway.open())
        (record,) = gateway.log.calls()
    assert record.untrainable is None
    assert record.logprobs_mode == mode
    rebuilt = Rebuilt(prompt_tokens=len(record.prompt.new_ids))
    assert own_reason(record, UsabilityRules(), rebuilt) == reason


async def test_missing_ids_make_a_call_untrainable(gateway: RunningGateway, engine: FakeEngine) -> None:
    key = await gateway.open()
    engine.complete_ids = False
    status, _, _ = await gateway.chat(key)
    assert status == 200
    (record,) = gateway.log.calls()
    assert record.untrainable == "ids_incomplete"
    assert len(record.sampled_ids) == len(record.logprobs) == 0


async def test_streamed_text_arrives_whole(gateway: RunningGateway, engine: FakeEngine) -> None:
    key = await gateway.open()
    engine.text = "many words in a row"
    events = await gateway.stream(key)
    assert content_of(events) == engine.text
    assert gateway.log.calls()[0].answer["content"] == engine.text
    assert not any(math.isnan(value) for value in gateway.log.calls()[0].logprobs)


async def test_an_engine_that_always_streams_serves_those_who_want_the_whole(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with running_gateway(tmp_path, engine.url, always_stream=True) as gateway:
        key = await gateway.open()
        status, body, _ = await gateway.chat(key, question("hi", n=2))
        assert status == 200
        assert engine.requests[0]["stream"] is True
        assert [c["message"]["content"] for c in body["choices"]] == ["ok", "ok"]
        assert [c["finish_reason"] for c in body["choices"]] == ["stop", "stop"]
        assert (body["object"], body["model"]) == ("chat.completion", "any-name")
        assert body["usage"]["completion_tokens"] == 6
        assert "token_ids" not in str(body)
        records = gateway.log.calls()
        assert [record.sampled_ids.tolist() for record in records] == [[*b"ok", CLOSE]] * 2
        assert [(record.stream, record.dialect) for record in records] == [(False, "chat")] * 2


async def test_a_template_that_takes_one_system_message_gets_one(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engine.url, system_anywhere=False) as gateway:
        key = await gateway.open()
        late = [{"role": "user", "content": "u"}, {"role": "system", "content": "s"}]
        await gateway.chat(key, {"messages": late})
        assert [message["role"] for message in engine.requests[0]["messages"]] == ["user", "user"]
        assert gateway.log.calls()[0].notes == ("messages[1]: system is given as user",)
