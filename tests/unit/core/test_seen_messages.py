"""A chat request means the same whether its messages were seen before, are new, or are read as a whole."""

import json
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.core.dialects import chat, seen_messages
from polar.core.dialects.base import ModelRequest
from polar.core.dialects.body import RequestError
from polar.core.dialects.chat import ChatDialect
from polar.core.dialects.system_messages import system_first
from polar.core.session_history import EncodedMessages, EncodedTools

texts = st.text('aé\n\u2028"', max_size=3)
values = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | texts | st.lists(st.none(), max_size=1)
contents = (
    texts | st.none() | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2)
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]), "content": contents},
    optional={"name": texts, "odd": values, "reasoning_content": texts},
)
items = messages | values
bodies = st.fixed_dictionaries(
    {"messages": st.lists(items, max_size=5) | values},
    optional={"tools": st.lists(
              st.just({"type": "function", "function": {"name": "f"}}) | values, max_size=2),
              "temperature": values, "stream": values, "n": values, "model": values, "unknown": values,
              "metadata": values, "stop": values},
)  # fmt: skip


def read(dialect: ChatDialect, raw: bytes) -> ModelRequest | tuple[str, str | None]:
    """The request, or what is wrong with it."""
    try:
        return dialect.parse_request(raw, {})
    except RequestError as error:
        return str(error), error.param


@given(st.lists(bodies, min_size=1, max_size=4), st.booleans())
def test_what_was_seen_before_changes_nothing(found: list[Any], indented: bool) -> None:
    dialect = ChatDialect()
    for body in (*found, *found):
        raw = json.dumps(body, indent=1 if indented else None, ensure_ascii=False).encode()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chat, "split", lambda _: None)
            whole = read(ChatDialect(), raw)
        request = read(dialect, raw)
        assert isinstance(request, ModelRequest) == isinstance(whole, ModelRequest)
        if not isinstance(request, ModelRequest) or not isinstance(whole, ModelRequest):
            assert request == whole
            continue
        assert (request.messages, request.tools) == (whole.messages, whole.tools)
        assert {**request.fields, "messages": 0, "tools": 0} == {**whole.fields, "messages": 0, "tools": 0}
        for each in (request, system_first(request)):
            assert each.encoded_messages() == EncodedMessages.of(each.messages)
            assert each.encoded_tools() == EncodedTools.of(each.tools)


def test_system_messages_that_are_moved_are_encoded_as_they_stand_then() -> None:
    body = {"messages": [{"role": role, "content": role} for role in ("system", "user", "system")]}
    request = read(ChatDialect(), json.dumps(body).encode())
    assert isinstance(request, ModelRequest)
    moved = system_first(request)
    assert moved.messages != request.messages
    assert moved.encoded_messages() == EncodedMessages.of(moved.messages)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "a": 01}',
        b'{"messages": [{"role": "user", "content": "x"}]',
        b'{"messages": [' + b"[" * 300 + b"]" * 300 + b"]}",
        b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "a": ' + b"[" * 300 + b"]" * 300 + b"}",
    ],
)
def test_what_is_no_json_or_too_deep_is_told_of_the_whole(raw: bytes) -> None:
    assert "request body" in str(read(ChatDialect(), raw))


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_messages, "MAX_BYTES", 1000)
    dialect = ChatDialect()
    for number in range(200):
        body = {
            "messages": [{"role": "user", "content": f"{number}" * 20}],
            "tools": [{"type": "function", "function": {"name": f"f{number}"}}],
        }
        assert isinstance(read(dialect, json.dumps(body).encode()), ModelRequest)
    seen = dialect._seen
    assert sum(map(len, seen._messages)) == seen._size <= 1000
    assert len(seen._tools) == seen_messages.MAX_TOOL_LISTS


@pytest.mark.parametrize("fields", [{}, {"temperature": 1, "stop": ["a"]}, {"unknown": {"a": [1]}, "n": 2}])
def test_fields_that_nobody_knows_are_split_off_like_others(fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"b": 1}], **fields}
    found = seen_messages.split(json.dumps(body).encode())
    assert found is not None
    assert found.fields == fields
    assert [json.loads(item) for item in found.messages] == body["messages"]
    assert json.loads(found.tools) == body["tools"]


def test_of_fields_that_come_twice_the_last_counts() -> None:
    raw = b'{"n":1,"messages":[1],"tools":[2],"n":3,"messages":[{"a":4}],"tools":[5]}'
    for data in (raw, raw.replace(b'"n":3', b'"x":3')):
        found = seen_messages.split(data)
        assert found is not None
        assert (found.messages, found.tools) == ([b'{"a":4}'], b"[5]")
        assert found.fields == {**({"n": 3} if data is raw else {"n": 1, "x": 3})}


def test_what_is_kept_of_messages_takes_a_few_times_their_size() -> None:
    dialect = ChatDialect()
    texts = [orjson.dumps({"role": "user", "content": f"{number:06d}" * 200}) for number in range(200)]
    tracemalloc.start()
    try:
        for text in texts:
            dialect.parse_request(b'{"messages":[%b]}' % text, {})
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 5 * sum(map(len, texts))
