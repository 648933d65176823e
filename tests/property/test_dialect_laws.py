"""Laws of all dialects, over any bytes, any answer and any split of any stream."""

import json
import re
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polar.core.dialects.base import Dialect, ModelRequest
from polar.core.dialects.body import RequestError
from polar.core.dialects.engine_answer import MALFORMED, AnswerError, Captured, read_answer
from polar.core.dialects.engine_body import count_body, engine_body
from polar.core.dialects.engine_stream import EngineStream
from polar.core.dialects.errors import ApiError
from polar.core.recording import Dispatched, build_records
from polar.core.session_history import EncodedMessages, EncodedTools, SessionHistory
from schemas.base import encode
from schemas.calls import CallRecord, Delivery
from schemas.codec import decode
from schemas.policies import BASE_VERSION
from schemas.tasks import SamplingSpec
from schemas.topics import CALLS
from tests.conformance.converting import convert, wire
from tests.conformance.reading import DIALECTS, Read, events_of, history, read_stream, read_whole
from tests.conformance.scripted import Say, stream_of, whole_of

every_dialect = pytest.mark.parametrize("name", DIALECTS)
BROKEN = ApiError(502, "broken", "upstream_error", "engine_unavailable", retry_after=1)

# -- requests -----------------------------------------------------------------------------------

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
CUSTOM: dict[str, Any] = {
    "type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
}  # fmt: skip
NAMESPACE = {"type": "namespace", "name": "ns", "tools": [TOOL, CUSTOM]}
SHELL: dict[str, Any] = {"type": "local_shell"}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "m", "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "a", "content": "x"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}], "stream_options": {}, "n": 1,
    },
    "responses": {
        "model": "m", "instructions": "i", "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "tool_choice": {"type": "function", "name": "f"}, "tools": [TOOL, CUSTOM, NAMESPACE, SHELL],
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "rs_a_0", "summary": [{"type": "summary_text", "text": "r"}]},
            {"type": "message", "id": "msg_a_1", "role": "assistant",
             "content": [{"type": "output_text", "text": "x"}]},
            {"type": "function_call", "id": "fc_a_2", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "x"},
            {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "b", "output": "x"},
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["x"]}},
            {"type": "additional_tools", "tools": [TOOL]},
        ],
    },
    "messages": {
        "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}],
        "thinking": {"type": "adaptive"},
        "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "{}"}, "output_config": {"effort": "high"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "r", "signature": "s"},
                {"type": "text", "text": "x"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}]}]},
            {"role": "system", "content": "s"},
        ],
    },
    "google": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "x"}]},
            {"role": "model", "parts": [
                {"text": "r", "thought": True}, {"functionCall": {"name": "f", "args": {}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "x"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {
            "responseJsonSchema": {"type": "OBJECT"}, "thinkingConfig": {"thinkingBudget": 0}},
    },
}  # fmt: skip

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def bent(draw: st.DrawFn, value: Any) -> Any:
    """The value with junk somewhere in it."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        name = draw(st.sampled_from(sorted(value)))
        return {**value, name: draw(bent(value[name]))}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], draw(bent(value[place])), *value[place + 1 :]]
    return draw(junk)


@every_dialect
def test_the_sample_bodies_are_requests(name: str) -> None:
    request = DIALECTS[name].parse_request(orjson.dumps(BODIES[name]), {}, "m")
    assert {message["role"] for message in request.messages} >= {"user", "assistant", "tool"}
    assert request.tools


@every_dialect
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_body_is_served_or_named(name: str, data: st.DataObject) -> None:
    raw = data.draw(st.binary(max_size=60) | bent(BODIES[name]).map(lambda value: json.dumps(value).encode()))
    dialect = DIALECTS[name]
    try:
        request = dialect.parse_request(raw, {}, "m")
    except RequestError as error:
        check_named(dialect, error)
        return
    body, used = engine_body(request, SamplingSpec(max_tokens=5), trainable=True, model="m")
    assert used["temperature"] == 1.0
    assert orjson.dumps(body)
    assert orjson.dumps(count_body(request, model="m"))
    assert all(isinstance(message.get("content"), (str, list)) for message in request.messages)
    first, *others = records(request, Captured(), Delivery.UPSTREAM_ERROR)
    assert first.messages.new == request.messages
    assert len(others) == request.choices - 1
    assert all(encode(record) for record in (first, *others))


def check_named(dialect: Dialect, error: RequestError) -> None:
    """The error says what is wrong and where, in the dialect's shape."""
    assert str(error)
    assert error.param is None or re.split(r"[.\[]", error.param)[0] in str(error)
    told = ApiError(400, str(error), "invalid_request_error", param=error.param)
    assert json.loads(dialect.error(told))["error"]["message"] == str(error)


def records(request: ModelRequest, captured: Captured, delivery: Delivery) -> list[CallRecord]:
    """One a choice that was asked for."""
    call = Dispatched(
        session_id="t/0/0/1", group_id="t", first_seq=1, open_calls=(), request=request,
        messages=EncodedMessages.of(request.messages), tools=EncodedTools.of(request.tools),
        sampling_used={"temperature": 1.0}, trainable=True, engine_id="engine-0",
        logprobs_mode="processed_logprobs", first_version=BASE_VERSION,
    )  # fmt: skip
    built = build_records(call, captured, SessionHistory(), last_version=BASE_VERSION, delivery=delivery)
    decoded = [decode(each.data, CALLS) for each in built]
    return [record for record in decoded if isinstance(record, CallRecord)]


# -- answers ------------------------------------------------------------------------------------

texts = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=12)
objects = st.dictionaries(texts, st.integers(-9, 9) | texts, max_size=2)
arguments = objects.map(json.dumps) | objects.map(lambda v: json.dumps(v, indent=1)) | texts
tools = st.sampled_from(["f", "ns__f", "patch", "ns__patch", "nobody"])
says = st.builds(
    Say,
    texts,
    texts,
    st.lists(st.tuples(tools, arguments), max_size=3),
    st.sampled_from(["", "length", "abort"]),
)


def request_of(name: str, **fields: Any) -> ModelRequest:
    body = {field: value for field, value in BODIES[name].items() if field != "tool_choice"} | fields
    if name == "responses":
        body = body | {"include": ["reasoning.encrypted_content"]}
    if name == "google":
        body = body | {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    return DIALECTS[name].parse_request(orjson.dumps(body), {}, "m")


@every_dialect
@settings(max_examples=50, deadline=None)
@given(say=says, data=st.data())
def test_any_split_of_a_stream_gives_the_same_events_and_record(
    name: str, say: Say, data: st.DataObject
) -> None:
    raw = wire(stream_of([say]))
    request = request_of(name)
    expected, whole = convert(DIALECTS[name], request, raw)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    reads = [raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    got, split = convert(DIALECTS[name], request, *reads)
    assert got == expected
    assert split.captured == whole.captured
    (one,), (other,) = (records(request, s.captured, Delivery.DELIVERED) for s in (whole, split))
    assert encode(one) == encode(other)
    assert one.untrainable is None
    assert len(one.sampled_ids) == len(say.deltas()) + 1


def told(read: Read) -> tuple[str, str, list[tuple[str, Any]]]:
    """What was understood, arguments as values where they are JSON."""
    return read.text, read.reasoning, [(name, _value(arguments)) for name, arguments in read.calls]


def _value(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        unparsed = arguments.get("__unparsedToolInput")
        return _value(unparsed["raw"]) if isinstance(unparsed, dict) else arguments
    try:
        return orjson.loads(arguments)  # to which NaN, unequal to itself, is no JSON
    except ValueError:
        return arguments


@every_dialect
@settings(max_examples=50, deadline=None)
@given(say=says)
@example(say=Say("", "", [("f", "NaN")], ""))
def test_streamed_and_whole_answers_say_what_the_model_said(name: str, say: Say) -> None:
    request = request_of(name)
    data, _ = convert(DIALECTS[name], request, wire(stream_of([say])))
    streamed = read_stream(name, events_of(data))
    captured, body = read_answer(json.dumps(whole_of([say])).encode(), request)
    whole = read_whole(name, json.loads(DIALECTS[name].answer(request, body, captured)))
    assert told(streamed) == told(whole)
    assert streamed.finish == whole.finish
    text, reasoning, calls = told(whole)
    assert (text, reasoning) == (say.text, say.reasoning)
    for (got_name, got), (name_said, said) in zip(calls, say.calls, strict=True):
        custom = name == "responses" and name_said.endswith("patch")
        assert got_name == (name_said if not custom else got_name)
        if not custom:
            assert got == _value(said) or (not said.strip() and got in ({}, said))


@every_dialect
@settings(max_examples=50, deadline=None)
@given(say=says)
def test_an_answer_comes_back_as_it_was_sampled(name: str, say: Say) -> None:
    """The harness keeps the answer and sends it as history: the canonical turn is the engine's."""
    request = request_of(name)
    data, stream = convert(DIALECTS[name], request, wire(stream_of([say])))
    echoed = read_stream(name, events_of(data)).whole
    if not (say.text or say.reasoning or say.calls) and name == "responses":
        return  # nothing was said, so no item tells of the turn
    body = BODIES[name] | history(name, echoed)
    back = DIALECTS[name].parse_request(orjson.dumps(body), {}, "m")
    turn = [message for message in back.messages if message["role"] == "assistant"][-1]
    sampled = stream.captured.choice(0).message
    assert turn["content"] == (sampled["content"] or "")
    if name != "google" or say.calls or not say.reasoning:
        assert turn.get("reasoning", "") == sampled.get("reasoning", "")
    calls = turn.get("tool_calls", [])
    assert [call["id"] for call in calls] == [call["id"] for call in sampled.get("tool_calls", [])]
    for call, (said_name, said) in zip(calls, say.calls, strict=True):
        assert call["function"]["name"] == said_name
        got = call["function"]["arguments"]
        plain = _value(said)
        if name == "responses" and said_name.endswith("patch"):
            text = plain.get("input") if isinstance(plain, dict) else None
            assert json.loads(got) == {"input": text if isinstance(text, str) else said}
        else:
            assert got == said or _value(got) == plain or (not said.strip() and got == "{}")


@every_dialect
@settings(max_examples=50, deadline=None)
@given(say=says, cut=st.integers(0, 40), data=st.data())
def test_a_stream_that_breaks_anywhere_never_ends_well(
    name: str, say: Say, cut: int, data: st.DataObject
) -> None:
    request = request_of(name)
    stream = EngineStream(request, 1)
    client = DIALECTS[name].stream(request, stream.captured)
    events = [event for event in stream_of([say]) if not isinstance(event, str)][:cut]
    if events and data.draw(st.booleans()):
        events[-1] = data.draw(bent(events[-1]))
    out = b""
    for event in events:
        try:
            chunk = stream.on_data(json.dumps(event).encode())
            if chunk is not None:
                out += client.on_chunk(chunk)
        except (AnswerError, *MALFORMED):
            break
    out += client.failure(BROKEN)
    text = out.decode()
    assert "broken" in text
    for end in ("[DONE]", "message_stop", "response.completed", "finishReason", '"finish_reason":"'):
        assert end not in text
    stream.close()
    assert all(map(encode, records(request, stream.captured, Delivery.UPSTREAM_ERROR)))


@every_dialect
@settings(max_examples=50, deadline=None)
@given(body=bent(whole_of([Say("x", "r", [("f", "{}")])])))
def test_whatever_the_engine_answers_is_an_answer_or_an_error(name: str, body: Any) -> None:
    request = request_of(name)
    try:
        captured, answer = read_answer(json.dumps(body).encode(), request)
        json.loads(DIALECTS[name].answer(request, answer, captured))
    except (AnswerError, *MALFORMED):
        return
