"""Engines that call reasoning `reasoning_content`, in what they read and in what they say.

To harnesses, on records and for continuity it is `reasoning`, whatever the engine.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.reading import Read, events_of, read_stream, read_whole
from tests.conformance.scripted import Say, stream_of, whole_of
from tests.unit.gateway.byte_model import save_byte_model
from tests.unit.gateway.fake_engine import Answer, FakeEngine
from tests.unit.gateway.running import RunningGateway, question, running_gateway

SAID = Say("Well.", "Let me think, 🦊.")
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1", "reasoning": "r1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2", "reasoning_content": "r2"},
    {"role": "user", "content": "q3"},
    {"role": "assistant", "content": "a3", "reasoning": "r3", "reasoning_content": "r3"},
    {"role": "user", "content": "q4"},
    {"role": "assistant", "content": "a4", "reasoning": None, "reasoning_content": ""},
    {"role": "user", "content": "q5"},
]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", question()),
    "responses": ("/v1/responses", {"model": "m", "input": "hi"}),
    "messages": (
        "/v1/messages",
        {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    ),
    "google": (
        "/v1beta/models/m:generateContent",
        {
            "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
            "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
        },
    ),
}


def told(*, stream: bool, names: tuple[str, ...]) -> Answer:
    """What an engine says that gives reasoning under these names."""

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            value = {name: named(item) for name, item in value.items()}
            reasoning = value.pop("reasoning", None)
            return value | ({} if reasoning is None else dict.fromkeys(names, reasoning))
        return [named(item) for item in value] if isinstance(value, list) else value

    if not stream:
        return Answer(json=named(whole_of([SAID])))
    events = [event if isinstance(event, str) else json.dumps(named(event)) for event in stream_of([SAID])]
    return Answer(writes=[f"data: {event}\n\n".encode() for event in events])


async def ask(gateway: RunningGateway, key: str, dialect: str, *, stream: bool) -> Read:
    """One call, as the dialect's client reads the answer."""
    path, body = CALLS[dialect]
    if dialect == "google":
        path = path.replace("generateContent", "streamGenerateContent") if stream else path
    else:
        body = {**body, "stream": stream}
    headers = {"Authorization": f"Bearer {key}"}
    async with gateway.http.post(gateway.url + path, json=body, headers=headers) as response:
        data = await response.read()
    assert response.status == 200, data
    assert b"reasoning_content" not in data
    return read_stream(dialect, events_of(data)) if stream else read_whole(dialect, json.loads(data))


@pytest.mark.parametrize("names", [("reasoning_content",), ("reasoning", "reasoning_content")], ids="+".join)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", CALLS)
async def test_reasoning_of_any_name_reaches_the_harness_and_the_record(
    gateway: RunningGateway, engine: FakeEngine, dialect: str, names: tuple[str, ...], *, stream: bool
) -> None:
    key = await gateway.open()
    engine.script = [told(stream=stream, names=names)]
    read = await ask(gateway, key, dialect, stream=stream)
    assert (read.text, read.reasoning) == (SAID.text, SAID.reasoning)
    (record,) = gateway.log.calls()
    assert record.answer["reasoning"] == SAID.reasoning
    assert "reasoning_content" not in record.answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_harness_that_wants_no_reasoning_gets_none_of_any_name(
    gateway: RunningGateway, engine: FakeEngine, *, stream: bool
) -> None:
    key = await gateway.open()
    engine.script = [told(stream=stream, names=("reasoning_content",))]
    body = question(include_reasoning=False, stream=stream)
    async with gateway.http.post(
        f"{gateway.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
    ) as response:
        data = await response.read()
    assert (SAID.text in data.decode()) is not stream  # a stream has it in pieces
    assert b"reasoning" not in data
    assert "think" not in data.decode()


@pytest.mark.parametrize("names", [None, "reasoning", "reasoning_content"])
async def test_a_history_tells_the_engine_its_reasoning_by_one_name(
    engine: FakeEngine, tmp_path: Path, names: str | None
) -> None:
    given = {} if names is None else {"reasoning_field": names}
    name = names or "reasoning"
    async with running_gateway(tmp_path, engine.url, **given) as gateway:
        key = await gateway.open()
        assert (await gateway.chat(key, {"messages": HISTORY}))[0] == 200
        path = "/v1/responses/input_tokens"
        thought = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "r"}]}
        counted = {"model": "m", "input": [thought, {"role": "assistant", "content": "a"}, *HISTORY[:1]]}
        assert (await gateway.chat(key, counted, path=path))[0] == 200
        (record,) = gateway.log.calls()
    answers = [message for message in engine.requests[0]["messages"] if message["role"] == "assistant"]
    assert [answer.get(name) for answer in answers] == ["r1", "r2", "r3", None]
    assert {field for answer in answers for field in answer} == {"role", "content", name}
    assert engine.counted[0]["messages"][0] == {"role": "assistant", "content": "a", name: "r"}
    # Records are of one form, so the trainer need not know the engine.
    kept = [message for message in record.messages.new if message["role"] == "assistant"]
    assert [answer.get("reasoning") for answer in kept] == ["r1", "r2", "r3", None]
    assert "reasoning_content" not in str(kept)


async def test_the_probe_of_an_engines_rendering_uses_its_name_too(
    engine: FakeEngine, tmp_path: Path
) -> None:
    folder = save_byte_model(tmp_path / "model")
    async with running_gateway(
        tmp_path, engine.url, model_path=folder, reasoning_field="reasoning_content"
    ) as gateway:
        assert gateway.parts.metrics()["engines_taking_ids"] == 1
    fields = {field for body in engine.probed for message in body["messages"] for field in message}
    assert "reasoning_content" in fields
    assert "reasoning" not in fields
