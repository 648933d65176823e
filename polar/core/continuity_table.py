"""What a gateway knows of the earlier calls of a session, so that the next can continue one.

A call is found by the name of its history (see message_marks) and its answer; its ids lie on a
trunk, which is shared by all calls whose prompts extend each other. So a session holds the ids of
its branches' ends once, and little more than names per call. A call's row, written with its record,
holds only the ids that are new: rows in order of seq rebuild the table.

Invariant: the table is dispensable. What it has lost is rendered in full.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from polar.core.message_marks import Mark
from polar.core.rendering import AnswerShape
from polar.core.token_text import TokenText

MAX_CALLS = 512
"""Calls of a session that can be continued; the oldest are forgotten first."""
MAX_ROWS = 4096
"""Calls of a session of which rows are kept; what comes later is lost to a restart."""
_CALL_BYTES = 1024
"""What a call costs besides its ids, roughly."""


@dataclass(slots=True)
class Trunk:
    """Ids of the longest call on it: prompt + sampled."""

    text: bytes
    calls: int = 0
    """Known calls on it."""


@dataclass(frozen=True, slots=True)
class Basis:
    """The known ids that a prompt begins with."""

    seq: int
    size: int
    """Bytes of text of leading ids of that call's prompt + sampled."""


class KnownCall(msgspec.Struct):
    """An earlier call."""

    seq: int
    parent: int | None
    """The call that it continues."""
    thread_id: str
    kind: str
    system: Mark
    """Name of the leading system messages."""
    tools: str
    """Digest of tools and template options."""
    before: Mark
    """Name of the history behind the leading system messages."""
    answer: Mark | None = None
    """None: no whole answer was delivered, so nothing can continue it."""
    spelling: bytes = b""
    """Digest of the answer as it was spelled; with equal marks, another one was re-serialised."""
    call_ids: tuple[str, ...] = ()
    call_names: tuple[str, ...] = ()
    has_reasoning: bool = False
    is_inline: bool = False
    """Its reasoning stands in its content."""
    thought_before: bool = False
    """An earlier answer of the same user turn had reasoning."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    said: tuple[str, ...] = ()
    """Beginnings of longer texts of the answer: a text answer, texts in arguments. A conversation
    that opens with one of them is a restart after a summary, or a sub-agent."""
    prompt_tokens: int = 0
    prompt_size: int = 0
    """Bytes of the prompt's text."""
    sampled_tokens: int = 0
    size: int = 0
    """Bytes of the text of prompt + sampled."""
    trunk: Trunk | None = None
    """None: its ids are not known."""

    @property
    def prompt(self) -> TokenText:
        """The prompt's ids, which must be known."""
        return TokenText(self._text(self.prompt_size), self.prompt_tokens)

    @property
    def sampled(self) -> TokenText:
        """The sampled ids, which must be known."""
        text = self._text(self.size)
        begin = self.prompt_size + 1 if self.prompt_size else 0
        return TokenText(text[begin:], self.sampled_tokens)

    @property
    def ids(self) -> TokenText:
        """Prompt + sampled, which must be known."""
        return TokenText(self._text(self.size), self.prompt_tokens + self.sampled_tokens)

    @property
    def shape(self) -> AnswerShape:
        """The answer for the template."""
        return AnswerShape(
            has_reasoning=self.has_reasoning,
            is_inline=self.is_inline,
            thought_before=self.thought_before,
            calls=tuple(zip(self.call_ids, self.call_names, strict=True)),
        )

    def _text(self, size: int) -> bytes:
        if self.trunk is None:
            raise LookupError(f"the ids of call {self.seq} are not known")
        return self.trunk.text[:size]


@dataclass(slots=True)
class ContinuityTable:
    """The calls of one session that later calls can continue."""

    calls: dict[int, KnownCall] = field(default_factory=dict)
    """By seq, in the order in which they were recorded."""
    num_rows: int = 0
    forgotten: int = 0
    """Calls that had to leave because there were too many."""
    _by_history: dict[Mark, list[KnownCall]] = field(default_factory=dict)
    _trunk_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Memory held, roughly."""
        return self._trunk_bytes + _CALL_BYTES * len(self.calls)

    def at(self, before: Mark) -> list[KnownCall]:
        """Calls with this history, whatever their system messages and tools; oldest first."""
        return self._by_history.get(before, [])

    def add(self, call: KnownCall, ids: TokenText | None, basis: Basis | None) -> bytes | None:
        """Remember a call; returns its row, or None when it gets none.

        `ids`: prompt + sampled, where they are known; `call.prompt_size` parts them. `basis`: what
        they begin with.
        """
        base = self.calls.get(basis.seq) if basis is not None else None
        shared = 0
        if ids is not None:
            call.size = len(ids.text)
            if base is not None and base.trunk is not None and basis is not None:
                shared = basis.size
                if shared == len(base.trunk.text):
                    call.trunk = base.trunk
                    self._trunk_bytes -= len(base.trunk.text)
            call.trunk = call.trunk or Trunk(b"")
            call.trunk.text = ids.text
            call.trunk.calls += 1
            self._trunk_bytes += len(ids.text)
        self._insert(call)
        if self.num_rows >= MAX_ROWS:
            return None
        self.num_rows += 1
        return _row(call, ids, base.seq if base is not None and shared else None, shared)

    def restore(self, rows: Iterable[bytes]) -> int:
        """Rebuild from rows in order of seq; returns how many calls lost their ids."""
        lost = 0
        for row in rows:
            call, base_seq, shared, new = _read_row(row)
            base = None if base_seq is None else self.calls.get(base_seq)
            text: bytes | None = new if base_seq is None else None
            if base is not None and base.trunk is not None and new is not None:
                text = base.trunk.text[:shared] + new
            lost += text is None and new is not None
            ids = None if text is None else TokenText(text)
            self.add(call, ids, None if base_seq is None else Basis(base_seq, shared))
        return lost

    def _insert(self, call: KnownCall) -> None:
        self.calls[call.seq] = call
        self._by_history.setdefault(call.before, []).append(call)
        if len(self.calls) > MAX_CALLS:
            self.forgotten += 1
            oldest = self.calls.pop(next(iter(self.calls)))
            siblings = self._by_history[oldest.before]
            siblings.remove(oldest)
            if not siblings:
                del self._by_history[oldest.before]
            if oldest.trunk is not None:
                oldest.trunk.calls -= 1
                if not oldest.trunk.calls:
                    self._trunk_bytes -= len(oldest.trunk.text)


_BYTES_FIELDS = ("system", "before", "answer", "spelling")
_PLAIN_FIELDS = (
    "seq", "parent", "thread_id", "kind", "tools", "call_ids", "call_names", "has_reasoning", "is_inline",
    "thought_before", "finish_reason", "stop_reason", "said", "prompt_tokens", "prompt_size",
    "sampled_tokens",
)  # fmt: skip
_TUPLE_FIELDS = ("call_ids", "call_names", "said")


def _row(call: KnownCall, ids: TokenText | None, base: int | None, shared: int) -> bytes:
    head: dict[str, Any] = {name: getattr(call, name) for name in _PLAIN_FIELDS}
    for name in _BYTES_FIELDS:
        value = getattr(call, name)
        head[name] = None if value is None else value.hex()
    head |= {"base": base, "shared": shared, "known": ids is not None}
    data = orjson.dumps(head)
    return b"".join((len(data).to_bytes(4, "little"), data, b"" if ids is None else ids.text[shared:]))


def _read_row(row: bytes) -> tuple[KnownCall, int | None, int, bytes | None]:
    """(call without ids, seq of its base, bytes of text shared with the base, new text)."""
    end = 4 + int.from_bytes(row[:4], "little")
    head: dict[str, Any] = orjson.loads(row[4:end])
    values: dict[str, Any] = {name: head[name] for name in _PLAIN_FIELDS}
    for name in _BYTES_FIELDS:
        values[name] = None if head[name] is None else bytes.fromhex(head[name])
    for name in _TUPLE_FIELDS:
        values[name] = tuple(values[name])
    return KnownCall(**values), head["base"], head["shared"], row[end:] if head["known"] else None
