"""Digests by which the messages of a request are recognised in the next.

Harnesses send a history back with other bytes and the same meaning: arguments re-serialised,
spaces at the ends of an answer trimmed, empty content as null, reasoning left out, cache marks
moved. A mark is equal for messages that mean the same to the model; the chain of marks names a
whole history in 16 bytes, so that looking for rewritten history costs one pass and no rendering.
"""

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import orjson

from polar.core.chat_template import Message

Mark = bytes
"""[16]"""

_MARK_BYTES = 16
_SYSTEM_ROLES = ("system", "developer")
_FLOAT = re.compile(r"\d[.eE]")
_SHORT = 512
"""Characters of arguments that are worth remembering: most calls come back in every request."""


_NAMED_LAST = 8
"""Harnesses that drop an answer and ask anew do so at the end of their history."""


class HistoryMarks:
    """The marks of one request's messages."""

    def __init__(self, messages: Sequence[Message], *, call_ids: bool) -> None:
        """`call_ids`: ids of tool calls are part of what the model sees."""
        self._messages = messages
        self._call_ids = call_ids
        first = next((i for i, m in enumerate(messages) if m["role"] not in _SYSTEM_ROLES), len(messages))
        system = hashlib.sha256()
        for message in messages[:first]:
            _add(system, normal_form(message, call_ids=call_ids))
        self.system: Mark = system.digest()[:_MARK_BYTES]
        """Name of the leading system messages."""
        self.before: dict[int, Mark] = {}
        """Name of the messages from the system messages up to message i: for every i that holds an
        answer, for the last few, and for the end."""
        state = hashlib.sha256()
        update = state.update
        last = len(messages) - _NAMED_LAST
        for index in range(first, len(messages)):
            message = messages[index]
            if message["role"] == "assistant" or index >= last:
                self.before[index] = state.copy().digest()[:_MARK_BYTES]
            form = normal_form(message, call_ids=call_ids)
            update(b"%d " % len(form))
            update(form)
        self.whole: Mark = state.digest()[:_MARK_BYTES]
        """Name of all messages behind the leading system messages."""

    def mark(self, index: int) -> Mark:
        """The mark of one message."""
        return answer_mark(self._messages[index], call_ids=self._call_ids)


def answer_mark(message: Message, *, call_ids: bool) -> Mark:
    """The mark that an assistant message will have when it comes back."""
    return hashlib.sha256(normal_form(message, call_ids=call_ids)).digest()[:_MARK_BYTES]


def normal_form(message: Message, *, call_ids: bool) -> bytes:
    """Bytes that are equal for messages of equal meaning."""
    role = message["role"]
    content = message.get("content") or ""
    is_text = isinstance(content, str)
    if role == "tool" and is_text and not call_ids:
        return b"tool\0" + content.encode("utf-8", "surrogatepass")
    if role == "assistant":
        parts = [content.strip().encode("utf-8", "surrogatepass") if is_text else _dump(content)]
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
        form = b"\0".join(parts)
    else:
        form = content.encode("utf-8", "surrogatepass") if is_text else _dump(content)
        if role == "tool":
            if call_ids:
                form += b"\0" + str(message.get("tool_call_id")).encode("utf-8", "surrogatepass")
            return b"tool\0" + form
    if message.get("name") is not None:
        form += b"\0name\0" + str(message["name"]).encode("utf-8", "surrogatepass")
    return (b"system" if role == "developer" else role.encode("utf-8", "surrogatepass")) + b"\0" + form


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


def _add(state: Any, form: bytes) -> None:
    state.update(b"%d " % len(form))
    state.update(form)


def _dump(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # Half a surrogate pair, a number over 64 bits.
        return repr(value).encode("utf-8", "backslashreplace")
