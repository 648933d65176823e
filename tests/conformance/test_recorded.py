"""Recorded harness traffic through the dialects, both ways."""

import json
from itertools import pairwise
from typing import Any

import pytest

from polar.core.dialects.base import ModelRequest
from polar.core.dialects.engine_answer import read_answer
from tests.conformance.converting import convert, wire
from tests.conformance.reading import Read, events_of, read_stream, read_whole
from tests.conformance.recorded import Exchange, loops
from tests.conformance.scripted import Say, stream_of, whole_of

every_loop = pytest.mark.parametrize("loop", loops())


@every_loop
def test_requests_are_read_completely(loop: list[Exchange]) -> None:
    for exchange in loop:
        request = exchange.request()
        called: set[str] = set()
        for message in request.messages:
            assert message["role"] in ("system", "developer", "user", "assistant", "tool")
            assert isinstance(message["content"], str)
            assert message["role"] == "assistant" or message["content"]
            called |= {call["id"] for call in message.get("tool_calls", ())}
            assert message["role"] != "tool" or message["tool_call_id"] in called
        text = json.dumps([request.messages, request.tools])
        assert not any(word in text for word in ("cache_control", "x-anthropic-billing", "encrypted_content"))
        names = [tool["function"]["name"] for tool in request.tools]
        assert len(names) == len(set(names))
        assert request.constrained == ("responseJsonSchema" in json.dumps(exchange.line["body"]))
        assert request.native_ids["harness"]


def say_of(read: Read) -> Say:
    """The model's words for what a harness understood."""
    calls = [(name, args if isinstance(args, str) else json.dumps(args)) for name, args in read.calls]
    return Say(read.text, read.reasoning, calls)


def plain(read: Read, *, reasoning: bool = True) -> tuple[str, str, list[tuple[str, Any]]]:
    return read.text, read.reasoning if reasoning else "", [(name, value(args)) for name, args in read.calls]


def value(arguments: Any) -> Any:
    """Arguments as a value where they are JSON, else as text."""
    if isinstance(arguments, dict) and "__unparsedToolInput" in arguments:
        arguments = arguments["__unparsedToolInput"]["raw"]
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


@every_loop
def test_answers_arrive_as_they_were_recorded(loop: list[Exchange]) -> None:
    for exchange in loop:
        recorded = exchange.answer()
        if recorded is None:
            continue
        request, dialect, say = exchange.request(), exchange.dialect, say_of(recorded)
        shown = exchange.name != "messages" or not request.echoed["omits_thinking"]
        data, _ = convert(dialect, request, wire(stream_of([say])))
        assert plain(read_stream(exchange.name, events_of(data))) == plain(recorded, reasoning=shown)
        captured, body = read_answer(json.dumps(whole_of([say])).encode(), request)
        whole = json.loads(dialect.answer(request, body, captured))
        assert plain(read_whole(exchange.name, whole)) == plain(recorded, reasoning=shown)


THINKS = ("codex", "claude", "qwen", "pi", "opencode", "mini")
"""These bring reasoning back."""


@pytest.mark.parametrize("loop", loops("basic", "reason", "parallel"))
def test_each_request_goes_on_where_the_last_answer_ended(loop: list[Exchange]) -> None:
    harness = loop[0].line["harness"]
    chain = [exchange for exchange in loop if exchange.request().tools]
    for before, after in pairwise(chain):
        first, second = before.request(), after.request()
        answer = before.answer()
        assert answer is not None
        assert second.tools == first.tools
        assert second.messages[: len(first.messages)] == first.messages
        turn = second.messages[len(first.messages)]
        assert turn["role"] == "assistant"
        assert turn["content"].strip() == answer.text.strip()
        calls = [
            (call["function"]["name"], value(call["function"]["arguments"]))
            for call in turn.get("tool_calls", ())
        ]
        assert calls == plain(answer)[2]
        if answer.reasoning and harness in THINKS:
            assert turn["reasoning"].strip() == answer.reasoning.strip()
        assert second.thread_id == first.thread_id


@every_loop
def test_sub_agents_and_compactions_say_who_they_are(loop: list[Exchange]) -> None:
    harness, scenario = loop[0].line["harness"], loop[0].line["scenario"]
    requests: list[ModelRequest] = [exchange.request() for exchange in loop]
    kinds = [request.kind for request in requests]
    if scenario == "sub" and harness in ("codex", "claude", "opencode"):
        assert set(kinds) == {"agent", "subagent"}
        threads = {kind: {r.thread_id for r in requests if r.kind == kind} for kind in kinds}
        assert not threads["agent"] & threads["subagent"]
        assert all(threads["subagent"])
    elif scenario.startswith("long") and harness == "codex":
        assert set(kinds) == {"agent", "compaction"}
        assert not any(request.tools for request in requests if request.kind == "compaction")
    else:
        assert set(kinds) == {"agent"}
