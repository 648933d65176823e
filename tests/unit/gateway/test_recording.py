"""Records from calls: deltas give back what was there, bounds hold, foreign data cannot break them."""

import contextlib
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import polar.core.recording as recording
from polar.core.dialects.base import ModelRequest
from polar.core.dialects.body import RequestError
from polar.core.dialects.chat import ChatDialect
from polar.core.dialects.engine_answer import MALFORMED, AnswerError, Captured, CapturedChoice, read_answer
from polar.core.dialects.engine_body import engine_body
from polar.core.dialects.engine_stream import EngineStream
from polar.core.recording import Dispatched, RecordedCall, build_records
from polar.core.session_history import EncodedMessages, EncodedTools, SessionHistory
from polar.core.session_keys import SessionClaims
from polar.core.token_text import TokenText, common_prefix
from polar.gateway.versions import EngineVersions, parse_weight_version
from schemas.base import canonical_json, digest, encode
from schemas.calls import CallRecord, Delivery
from schemas.codec import decode
from schemas.policies import BASE_VERSION, PolicyVersion
from schemas.tasks import SamplingSpec
from schemas.topics import CALLS

CHAT = ChatDialect()
ids = st.lists(st.integers(0, 3) | st.integers(0, 130), max_size=12)


def parse_request(raw: bytes) -> ModelRequest:
    return CHAT.parse_request(raw, {})


def dispatched(
    seq: int, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), **fields: Any
) -> Dispatched:
    request = parse_request(json.dumps({"messages": messages, "tools": list(tools), **fields}).encode())
    return Dispatched(
        session_id="t/0/0/1", group_id="t", first_seq=seq, open_calls=(), request=request,
        messages=EncodedMessages.of(request.messages), tools=EncodedTools.of(request.tools),
        sampling_used={"temperature": 1.0}, trainable=True, engine_id="engine-0",
        logprobs_mode="processed_logprobs", first_version=BASE_VERSION,
    )  # fmt: skip


def built(
    call: Dispatched,
    prompt: list[Any] | TokenText,
    sampled: list[Any],
    history: SessionHistory,
    **choice: Any,
) -> CallRecord:
    captured = Captured(
        prompt_ids=prompt, usage={"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
    )
    captured.choices[0] = CapturedChoice(
        token_ids=sampled, logprobs=[-1.0] * len(sampled), finish_reason="stop", **choice
    )
    (built,) = build_records(call, captured, history, last_version=BASE_VERSION, delivery=Delivery.DELIVERED)
    return read(built)


def read(built: RecordedCall) -> CallRecord:
    """The record, whose bytes are the canonical ones."""
    record = decode(built.data, CALLS)
    assert isinstance(record, CallRecord)
    assert built.data == encode(record)
    assert (built.seq, built.choice_index, built.sampled.tolist()) == (
        record.seq, record.choice_index, record.sampled_ids.tolist()
    )  # fmt: skip
    assert (built.delivery, built.untrainable, built.error, built.finish_reason) == (
        record.delivery, record.untrainable, record.error, record.finish_reason
    )  # fmt: skip
    return record


@given(ids, ids)
def test_common_prefix(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(TokenText.of(a).text, TokenText.of(b).text) == len(TokenText.of(a[:expected]).text)


@given(
    st.lists(
        st.tuples(ids, ids, st.lists(st.sampled_from("abc"), min_size=1, max_size=5), st.booleans()),
        max_size=20,
    )
)
def test_deltas_give_back_prompts_messages_and_tools(
    calls: list[tuple[list[int], list[int], list[str], bool]],
) -> None:
    history = SessionHistory()
    sequences: dict[int, list[int]] = {}
    texts: dict[int, list[dict[str, Any]]] = {}
    tools_by_digest: dict[str, Any] = {}
    for seq, (prompt, sampled, words, with_tools) in enumerate(calls, start=1):
        messages = [{"role": "user", "content": word} for word in words]
        tools = [{"type": "function", "function": {"name": "f"}}] if with_tools else []
        record = built(dispatched(seq, messages, tools), prompt, sampled, history)

        base = [] if record.prompt.base_call is None else sequences[record.prompt.base_call]
        assert base[: record.prompt.kept] + record.prompt.new_ids.tolist() == prompt
        sequences[seq] = prompt + sampled
        kept = [] if record.messages.base_call is None else texts[record.messages.base_call]
        texts[seq] = kept[: record.messages.kept] + list(record.messages.new)
        assert texts[seq] == messages
        marks = [hashlib.sha256(canonical_json(message)).digest() for message in messages]
        assert record.messages.digest == digest(*marks)
        if record.tools.tools is not None:
            tools_by_digest[record.tools.digest] = list(record.tools.tools)
        assert tools_by_digest[record.tools.digest] == tools
        assert decode(encode(record), CALLS) == record


def test_a_record_over_the_limit_keeps_its_ids_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_RECORD_BYTES", 5000)
    history = SessionHistory()
    long = [{"role": "user", "content": "x" * 6000}]
    record = built(dispatched(1, long), [1, 2], [3], history)
    assert record.untrainable == "record_too_large"
    assert record.sampled_ids.tolist() == [3]
    assert record.messages.new == ()
    assert "texts left out" in record.error
    following = built(dispatched(2, [{"role": "user", "content": "y"}]), [1, 2], [3], history)
    assert following.prompt.base_call is None
    assert following.untrainable is None


@pytest.mark.parametrize(
    ("prompt", "sampled"), [(["a"], [1]), ([1], ["a"]), ([2**40], [1]), ([1], [1.5]), ([], [1])]
)
def test_ids_that_are_none_make_a_call_untrainable(prompt: list[Any], sampled: list[Any]) -> None:
    record = built(dispatched(1, [{"role": "user", "content": "x"}]), prompt, sampled, SessionHistory())
    assert record.untrainable == "ids_incomplete"
    assert len(record.sampled_ids) == len(record.logprobs)


@pytest.mark.parametrize("known", [[], [1, 2]])
def test_a_text_that_holds_no_ids_makes_a_call_untrainable(known: list[int]) -> None:
    history = SessionHistory()
    messages = [{"role": "user", "content": "x"}]
    built(dispatched(1, messages), known, [3], history)
    record = built(dispatched(2, messages), TokenText(b'1,2,3,"a"'), [1], history)
    assert (record.untrainable, record.prompt.new_ids.tolist()) == ("ids_incomplete", [])


def test_log_probs_that_lack_are_nan() -> None:
    captured = Captured(prompt_ids=[1], usage={"prompt_tokens": 1, "completion_tokens": 3})
    captured.choices[0] = CapturedChoice(token_ids=[1, 2, 3], logprobs=[-0.5])
    (built,) = build_records(
        dispatched(1, [{"role": "user", "content": "x"}]), captured, SessionHistory(),
        last_version=BASE_VERSION, delivery=Delivery.DELIVERED,
    )  # fmt: skip
    record = read(built)
    assert record.logprobs.tolist()[0] == -0.5
    assert all(math.isnan(value) for value in record.logprobs.tolist()[1:])
    assert record.untrainable == "ids_incomplete"


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
_CALL = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "x", "tool_calls": [_CALL]},
    "delta": {"role": "assistant", "content": "x", "tool_calls": [_CALL]},
    "logprobs": {"content": [{"token": "token_id:1", "logprob": -1.0}]},
    "finish_reason": "stop",
    "token_ids": [1],
}
ANSWER = {
    "id": "c",
    "model": "m",
    "choices": [_CHOICE],
    "prompt_token_ids": [1, 2],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}},
}
REQUEST = {
    "model": "m",
    "messages": [{"role": "user", "content": "x", "reasoning_content": "y"}],
    "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 1,
    "max_tokens": 3,
    "tool_choice": "auto",
    "response_format": {"type": "text"},
}


@st.composite
def bent(draw: st.DrawFn, value: Any) -> Any:
    """The value with junk somewhere in it."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        name = draw(st.sampled_from(sorted(value)))
        return {**value, name: draw(bent(value[name]))}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        return [draw(bent(value[0])), *value[1:]]
    return draw(junk)


@given(bent(ANSWER), st.booleans())
def test_whatever_an_engine_says_a_record_comes_out(value: Any, hide: bool) -> None:
    request = parse_request(json.dumps({**REQUEST, "include_reasoning": not hide}).encode())
    data = json.dumps(value).encode()
    captured = Captured()
    with contextlib.suppress(AnswerError):
        captured, body = read_answer(data, request)
        with contextlib.suppress(*MALFORMED):
            json.loads(CHAT.answer(request, body, captured))
    stream = EngineStream(request, 1)
    client = CHAT.stream(request, stream.captured)
    with contextlib.suppress(AnswerError):
        chunk = stream.on_data(data)
        if chunk is not None:
            with contextlib.suppress(*MALFORMED):
                client.on_chunk(chunk)
    for kept in (captured, stream.close()):
        (built,) = build_records(
            dispatched(1, [{"role": "user", "content": "x"}]), kept, SessionHistory(),
            last_version=BASE_VERSION, delivery=Delivery.UPSTREAM_ERROR,
        )  # fmt: skip
        assert read(built).call_id == "t/0/0/1#1"


@given(st.binary(max_size=60) | bent(REQUEST).map(lambda value: json.dumps(value).encode()))
def test_any_request_body_is_served_or_named(raw: bytes) -> None:
    try:
        request = parse_request(raw)
    except RequestError:
        return
    body, used = engine_body(request, SamplingSpec(max_tokens=5), trainable=True, model="m")
    assert used["temperature"] == 1.0
    assert body["return_token_ids"] is True


def test_a_streamed_tool_call_is_put_together_and_reasoning_can_be_hidden() -> None:
    request = parse_request(
        b'{"messages":[{"role":"user","content":"x"}],"include_reasoning":false,"parallel_tool_calls":false}'
    )
    stream = EngineStream(request, 1)
    client = CHAT.stream(request, stream.captured)
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "reasoning": "secret"},
        {
            "tool_calls": [
                {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}
            ]
        },
    ]
    sent = b""
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [1]}
        chunk = stream.on_data(json.dumps({"id": "c", "choices": [choice]}).encode())
        assert chunk is not None
        sent += client.on_chunk(chunk)
    assert b"secret" not in sent
    assert b'"b"' not in sent
    message = stream.close().choice(0).message
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    assert message == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert stream.captured.choice(0).token_ids == [1] * 5


def version(step: int) -> PolicyVersion:
    return PolicyVersion(lineage="run", step=step)


def test_version_intervals_are_never_too_narrow() -> None:
    versions = EngineVersions()
    across = versions.open()
    versions.tell("pending", version(1))
    in_pause = versions.open()
    versions.tell("settled", version(1))
    assert versions.close(across) == version(1)
    assert (in_pause.first, versions.close(in_pause)) == (BASE_VERSION, version(1))
    quiet = versions.open()
    assert (quiet.first, versions.close(quiet)) == (version(1), version(1))
    # A load that was tried and rolled back may have made tokens.
    rolled = versions.open()
    versions.tell("pending", version(2))
    versions.tell("settled", version(1))
    assert (rolled.first, versions.close(rolled)) == (version(1), version(2))
    assert versions.close(rolled) == version(2)


def test_what_an_engine_says_never_overrules_weight_sync() -> None:
    versions = EngineVersions()
    versions.observe(version(1), versions.times_told)
    assert versions.settled == version(1)
    asked = versions.times_told
    versions.tell("pending", version(2))
    versions.observe(version(1), asked)
    versions.observe(version(2), versions.times_told)  # in the middle of the load
    assert (versions.settled, versions.pending) == (version(1), version(2))
    versions.tell("settled", version(2))
    versions.observe(version(1), asked)  # an answer that was long under way
    assert versions.settled == version(2)


def test_weight_versions_of_engines() -> None:
    assert parse_weight_version("default") == BASE_VERSION
    assert parse_weight_version("run:3") == version(3)
    with pytest.raises(ValueError, match="lineage:step"):
        parse_weight_version("42")


def test_claims_cap_the_token_limit() -> None:
    claims = SessionClaims(
        session_id="s", group_id="g", gateway_id="x", expires_at=1.0, sampling=SamplingSpec(max_tokens=10)
    )
    for fields, expected in (
        ({}, 10),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 50, "max_tokens": 1}, 10),
    ):
        request = parse_request(json.dumps({"messages": [{"role": "user"}], **fields}).encode())
        body, _ = engine_body(request, claims.sampling, trainable=True, model="m")
        assert body["max_tokens"] == expected
