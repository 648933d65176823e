"""The message histories of a session's calls, rebuilt from deltas, and when two messages are equal.

Only calls that split are read, so histories are built on demand; a few are remembered, because
calls that split are compared with their neighbours.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.calls import CallRecord

Message = Mapping[str, Any]

_REMEMBERED = 16
_MAX_STEPS = 64
"""Deltas that are followed to find what two histories share."""
_MARKS = frozenset({"cache_control", "tool_call_id", "id"})
"""Fields that no chat template renders and that harnesses change from call to call."""


class Histories:
    """Whole histories of one session, and a canonical form of its messages."""

    def __init__(self, records: Mapping[int, CallRecord]) -> None:
        """`records`: by number. They are kept, so a message keeps its identity."""
        self._records = records
        self._recent: OrderedDict[int, list[Message]] = OrderedDict()
        self._canonical: dict[int, str] = {}
        """id() of a message → its canonical form."""

    def of(self, seq: int) -> list[Message] | None:
        """Messages of a call's request; None where a base is missing or nothing was recorded."""
        chain: list[tuple[int, int, tuple[Message, ...]]] = []
        number: int | None = seq
        messages: list[Message] = []
        while number is not None:
            if number in self._recent:
                messages = self._recent[number]
                break
            record = self._records.get(number)
            if record is None or (chain and number >= chain[-1][0]):
                return None
            delta = record.messages
            chain.append((number, delta.kept, delta.new))
            number = delta.base_call
        for _, kept, new in reversed(chain):
            if kept > len(messages):
                return None
            messages = [*messages[:kept], *new]
        self._recent[seq] = messages
        self._recent.move_to_end(seq)
        if len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        return messages or None

    def is_same(self, left: Message, right: Message) -> bool:
        """Whether two messages mean the same to a chat template."""
        return left is right or self.canonical(left) == self.canonical(right)

    def canonical(self, message: Message) -> str:
        """Equal for messages that mean the same."""
        known = self._canonical.get(id(message))
        if known is None:
            known = self._canonical[id(message)] = canonical(message)
        return known

    def shared(self, left: int, right: int) -> int:
        """Leading messages that two calls have in common by their deltas alone, or fewer."""
        shared = None
        for _ in range(_MAX_STEPS):
            if left == right:
                break
            later, left = max(left, right), min(left, right)
            record = self._records.get(later)
            if record is None or record.messages.base_call is None or record.messages.base_call >= later:
                return 0
            kept = record.messages.kept
            shared = kept if shared is None else min(shared, kept)
            right = record.messages.base_call
        return shared if shared is not None and left == right else 0

    def first_difference(
        self, now: Sequence[Message], before: Sequence[Message], shared: int = 0
    ) -> int | None:
        """Index of the first message that differs; None where one history begins with the other.

        `shared`: leading messages that are known to be equal.
        """
        for index in range(min(shared, len(now), len(before)), min(len(now), len(before))):
            if not self.is_same(now[index], before[index]):
                return index
        return None

    def count(self, seq: int) -> int:
        """Number of messages of a call's request."""
        delta = self._records[seq].messages
        return delta.kept + len(delta.new)


def canonical(message: Message) -> str:
    """Absent, null and empty fields are one; text parts are their text; ids and cache marks are left out."""
    try:
        return json.dumps(_plain(message), sort_keys=True, default=str)
    except RecursionError:
        return f"nested too deep to be read: {sorted(message)}"


def _plain(message: Message) -> dict[str, Any]:
    filled = {key: value for key, value in message.items() if value not in (None, "", [], {})}
    plain = {key: value for key, value in filled.items() if key not in _MARKS}
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = _joined(content)
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_without_id(call) for call in calls]
    return plain


def _joined(parts: list[Any]) -> Any:
    """The text of a list of text parts; any other list without its cache marks."""
    found = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [
        {key: value for key, value in part.items() if key != "cache_control"}
        if isinstance(part, Mapping)
        else part
        for part in parts
    ]


def _without_id(call: Any) -> Any:
    return {key: value for key, value in call.items() if key != "id"} if isinstance(call, Mapping) else call
