"""Digests by which the messages of a request are recognised in the next.

Harnesses send a history back with other bytes and the same meaning: arguments re-serialised,
spaces at the ends of an answer trimmed, empty content as null, reasoning left out, cache marks
moved. A mark is equal for messages that mean the same to the model; the chain of marks names a
whole history in 16 bytes, so that looking for rewritten history costs one pass and no rendering.
"""

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import orjson

from polar.core.chat_template import Message
from polar.core.session_history import EncodedMessages
from schemas.base import canonical_json

Mark = bytes
"""[16]"""

_MARK_BYTES = 16
_SYSTEM_ROLES = ("system", "developer")
_PLAIN_ROLES = frozenset({"system", "user"})
_PLAIN_FIELDS = 2
"""Role and content."""
_FLOAT = re.compile(r"\d[.eE]")
_SHORT = 512
"""Characters of arguments that are worth remembering: most calls come back in every request."""


_NAMED_LAST = 8
"""Harnesses that drop an answer and ask anew do so at the end of their history."""


class HistoryMarks:
    """The marks of one request's messages."""

    def __init__(
        self,
        messages: Sequence[Message],
        encoded: EncodedMessages,
        *,
        call_ids: bool,
        known: dict[bytes, Mark] | None = None,
    ) -> None:
        """`encoded`: the same messages. `call_ids`: ids of tool calls are part of what the model sees.

        `known`: marks by SHA-256 of a message's canonical JSON; learns those of these messages.
        """
        known = {} if known is None else known
        if not all(map(known.__contains__, encoded.marks)):
            for message, digest in zip(messages, encoded.marks, strict=True):
                if digest not in known:
                    known[digest] = _mark(message, digest, call_ids=call_ids)
        self._marks = marks = [known[digest] for digest in encoded.marks]
        self._roles = [message["role"] for message in messages]
        self._first = next((i for i, role in enumerate(self._roles) if role not in _SYSTEM_ROLES), len(marks))
        self.system: Mark = _name(marks[: self._first])
        """Name of the leading system messages."""
        self.whole: Mark = _name(marks[self._first :])
        """Name of all messages behind the leading system messages."""

    @cached_property
    def before(self) -> dict[int, Mark]:
        """Name of the messages from the system messages up to message i: for every i that holds an
        answer, and for the last few."""
        first, size = self._first, len(self._marks)
        last = max(first, size - _NAMED_LAST)
        named: dict[int, Mark] = {}
        state = hashlib.sha256()
        begin = first
        for index in range(first, size):
            if index >= last or self._roles[index] == "assistant":
                state.update(b"".join(self._marks[begin:index]))
                begin = index
                named[index] = state.copy().digest()[:_MARK_BYTES]
        return named

    def mark(self, index: int) -> Mark:
        """The mark of one message."""
        return self._marks[index]


def _name(marks: Sequence[Mark]) -> Mark:
    return hashlib.sha256(b"".join(marks)).digest()[:_MARK_BYTES]


def answer_mark(message: Message, *, call_ids: bool) -> Mark:
    """The mark that an assistant message will have when it comes back."""
    return hashlib.sha256(normal_form(message, call_ids=call_ids)).digest()[:_MARK_BYTES]


def _mark(message: Message, digest: bytes, *, call_ids: bool) -> Mark:
    """The mark of a message whose canonical JSON has this digest."""
    if len(message) == _PLAIN_FIELDS and message["role"] in _PLAIN_ROLES:
        return digest[:_MARK_BYTES]  # canonical JSON is its normal form
    return hashlib.sha256(normal_form(message, call_ids=call_ids)).digest()[:_MARK_BYTES]


def normal_form(message: Message, *, call_ids: bool) -> bytes:
    """Bytes that are equal for messages of equal meaning."""
    role = message["role"]
    content = message.get("content") or ""
    if role == "assistant":
        is_text = isinstance(content, str)
        parts = [
            b"assistant",
            content.strip().encode("utf-8", "surrogatepass") if is_text else _dump(content),
        ]
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            arguments = function.get("arguments")
            short = isinstance(arguments, str) and len(arguments) <= _SHORT
            parts += [
                str(function.get("name")).encode("utf-8", "surrogatepass"),
                _short_arguments(arguments) if short else plain_arguments(arguments),
            ]
            if call_ids:
                parts.append(str(call.get("id")).encode("utf-8", "surrogatepass"))
        if message.get("name") is not None:
            parts += [b"name", str(message["name"]).encode("utf-8", "surrogatepass")]
        return b"\0".join(parts)
    if role == "tool":
        form = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else _dump(content)
        call_id = str(message.get("tool_call_id")).encode("utf-8", "surrogatepass") if call_ids else b""
        return b"\0".join((b"tool", form, call_id))
    plain = {"content": content, "role": "system" if role == "developer" else role}
    if message.get("name") is not None:
        plain["name"] = message["name"]
    return canonical_json(plain)


def plain_arguments(arguments: Any) -> bytes:
    """Arguments in one spelling, so that equal JSON is equal; text that is no JSON stays as it is."""
    if not isinstance(arguments, str):
        return _dump(arguments)
    try:
        data = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return b"\0" + arguments.encode("utf-8", "surrogatepass")
    # JavaScript writes 1.0 as 1.
    return _dump(_whole_floats_as_ints(data) if _FLOAT.search(arguments) else data)


@lru_cache(maxsize=8192)
def _short_arguments(arguments: str) -> bytes:
    return plain_arguments(arguments)


def _whole_floats_as_ints(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _whole_floats_as_ints(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_floats_as_ints(item) for item in value]
    return value


def _dump(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # Half a surrogate pair, a number over 64 bits.
        return repr(value).encode("utf-8", "backslashreplace")
