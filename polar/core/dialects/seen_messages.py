"""Messages and tools of chat requests by their bytes: what came before is not read again.

A harness sends its system prompt and tools with every call of every session, and its whole history with
every call: of a request, nearly all was seen before. So the body is only split at first, and
messages are recognised by their bytes. Equal bytes mean equal messages; what is new is read and
checked as it would be alone. Bounded in bytes, the longest unseen are forgotten first; who was seen when
is only noted while more than half of the room is taken.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast

import msgspec

from polar.core.dialects.body import load_value
from polar.core.dialects.engine_body import READ_FIELDS
from polar.core.session_history import MAX_TOOL_LISTS, EncodedMessages, EncodedTools

MAX_BYTES = 64 * 1024 * 1024
"""Of the messages' own text; in memory they are a few times as large."""
_body = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[msgspec.Raw])
_USUAL = tuple(
    name
    for name in (
        *READ_FIELDS, "model", "stream", "stream_options", "include_reasoning", "logprobs", "top_logprobs",
        "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier", "verbosity",
    )
    if name.isidentifier()
)  # fmt: skip
"""Fields in bodies that are read in one pass; a body with any other one takes two."""
_ABSENT = msgspec.Raw(b"")
_usual = msgspec.json.Decoder(
    msgspec.defstruct(
        "UsualBody",
        [
            ("messages", list[msgspec.Raw]),
            ("tools", msgspec.Raw, _ABSENT),
            *((name, msgspec.Raw, _ABSENT) for name in _USUAL),
        ],
        forbid_unknown_fields=True,
    )
)
_parts_of = attrgetter("messages", "tools", *_USUAL)

Reader = Callable[[Any, int], dict[str, Any]]
"""(item, index) → canonical message. Raises RequestError."""


@dataclass(frozen=True, slots=True)
class SplitBody:
    """A request's body with its two large parts unread."""

    fields: dict[str, Any]
    """The others."""
    messages: list[bytes]
    tools: bytes


def split(raw: bytes) -> SplitBody | None:
    """None where the body is anything but an object with a list of messages."""
    try:
        messages, tools, parts = _split_usual(raw)
    except msgspec.MsgspecError:
        try:
            messages, tools, parts = _split_any(raw)
        except (msgspec.MsgspecError, KeyError):
            return None
    try:
        fields = {name: load_value(bytes(part)) for name, part in parts}
    except ValueError:
        return None
    return SplitBody(fields, [bytes(item) for item in messages], bytes(tools))


Parts = tuple[list[msgspec.Raw], msgspec.Raw, Iterable[tuple[str, msgspec.Raw]]]
"""Messages, tools, the other fields."""


def _split_usual(raw: bytes) -> Parts:
    messages, tools, *others = _parts_of(_usual.decode(raw))
    named = zip(_USUAL, others, strict=True)
    return messages, tools, [(name, part) for name, part in named if part is not _ABSENT]


def _split_any(raw: bytes) -> Parts:
    parts = _body.decode(raw)
    messages = _list.decode(parts.pop("messages"))
    return messages, parts.pop("tools", _ABSENT), parts.items()


@dataclass(slots=True, eq=False)
class _Seen:
    message: dict[str, Any]
    """Shared by all requests: never changed."""
    text: bytes
    mark: bytes
    size: int


@dataclass(slots=True)
class SeenMessages:
    """What was seen so far."""

    read: Reader
    _messages: OrderedDict[bytes, _Seen] = field(default_factory=OrderedDict)
    _tools: OrderedDict[bytes, tuple[tuple[dict[str, Any], ...], EncodedTools]] = field(
        default_factory=OrderedDict
    )
    _size: int = 0

    def messages(self, items: Sequence[bytes]) -> tuple[tuple[dict[str, Any], ...], EncodedMessages]:
        """Canonical messages and what is encoded of them. Raises RequestError; ValueError for no JSON."""
        known = list(map(self._messages.get, items))
        if self._size > MAX_BYTES // 2 or None in known:
            known = [self._message(item, index) for index, item in enumerate(items)]
        seen = cast("list[_Seen]", known)
        encoded = EncodedMessages(tuple([one.text for one in seen]), tuple([one.mark for one in seen]))
        return tuple([one.message for one in seen]), encoded

    def tools(
        self, raw: bytes, read: Callable[[Any], tuple[dict[str, Any], ...]]
    ) -> tuple[tuple[dict[str, Any], ...], EncodedTools]:
        """Tools as `read` makes them of the value. Raises RequestError; ValueError for no JSON."""
        known = self._tools.get(raw)
        if known is None:
            tools = read(load_value(raw) if raw else None)
            known = self._tools[raw] = tools, EncodedTools.of(tools)
            if len(self._tools) > MAX_TOOL_LISTS:
                self._tools.popitem(last=False)
        else:
            self._tools.move_to_end(raw)
        return known

    def _message(self, item: bytes, index: int) -> _Seen:
        seen = self._messages.get(item)
        if seen is not None:
            self._messages.move_to_end(item)
            return seen
        message = self.read(load_value(item), index)
        encoded = EncodedMessages.of((message,))
        seen = self._messages[item] = _Seen(message, encoded.texts[0], encoded.marks[0], len(item))
        self._size += len(item)
        while self._size > MAX_BYTES:
            self._size -= self._messages.popitem(last=False)[1].size
        return seen
