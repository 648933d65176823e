"""What the records of a session are delta-encoded against: a few earlier calls, and its tool lists.

Bounded, and dispensable: without a history the same record comes out whole.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from polar.core.token_text import TokenText
from schemas.base import canonical_json, digest
from schemas.calls import MessagesDelta, PromptDelta, ToolsDelta
from schemas.columns import TokenColumn

BASES = 8
"""Earlier calls that are tried as a base: enough for a few interleaved sub-agents."""
MAX_TOOL_LISTS = 64
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class EncodedMessages:
    """A request's messages with what the history and the record need of them."""

    messages: tuple[dict[str, Any], ...]
    texts: tuple[bytes, ...]
    """Canonical JSON of each."""
    marks: tuple[bytes, ...]
    """SHA-256 of each text."""

    @classmethod
    def of(cls, messages: tuple[dict[str, Any], ...]) -> "EncodedMessages":
        """Encode each once."""
        texts = tuple([canonical_json(message) for message in messages])
        return cls(messages, texts, tuple([hashlib.sha256(text).digest() for text in texts]))


@dataclass(frozen=True, slots=True)
class EncodedTools:
    """A request's tools with what the history and the record need of them."""

    tools: tuple[dict[str, Any], ...]
    digest: str
    texts: tuple[bytes, ...]
    """Canonical JSON of each."""

    @classmethod
    def of(cls, tools: Sequence[dict[str, Any]]) -> "EncodedTools":
        """Encode them, or find them encoded."""
        return _encoded_tools(orjson.dumps(tools))


@lru_cache(maxsize=MAX_TOOL_LISTS)
def _encoded_tools(data: bytes) -> EncodedTools:
    """The same list comes with every call, also of other sessions; its canonical form costs far
    more than this look-up."""
    tools = orjson.loads(data)
    texts = tuple([canonical_json(tool) for tool in tools])
    return EncodedTools(tuple(tools), digest(*texts), texts)


@dataclass(frozen=True, slots=True)
class _Base:
    seq: int
    ids: bytes
    """Packed prompt + sampled ids."""
    text: bytes
    """The same as an engine writes them; empty where that is not known."""
    marks: tuple[bytes, ...]
    """Of the request's messages."""

    @property
    def size_bytes(self) -> int:
        return len(self.ids) + len(self.text) + 64 * len(self.marks)

    def says_no_more_than(self, other: "_Base") -> bool:
        """Whether every later call shares at least as much with the other."""
        return other.ids.startswith(self.ids) and other.marks[: len(self.marks)] == self.marks


@dataclass(slots=True)
class SessionHistory:
    """See the module."""

    _bases: list[_Base] = field(default_factory=list)
    """The latest last."""
    _tool_lists: set[str] = field(default_factory=set)
    """Digests of lists that stand in full in a record of the session."""

    @property
    def size_bytes(self) -> int:
        """Memory held, roughly."""
        return sum(base.size_bytes for base in self._bases)

    def pack(self, ids: TokenText) -> TokenColumn:
        """Prompt ids as a column; those of an earlier call are not read again.

        Raises OverflowError or ValueError for what is none.
        """
        for base in reversed(self._bases):
            if base.text and ids.begins_with(base.text):
                return TokenColumn.from_bytes(ids.packed(base.text, base.ids))
        return TokenColumn.from_bytes(ids.packed())

    def text_of(self, ids: TokenColumn) -> TokenText:
        """A column as an engine writes it; what is known of an earlier call is not written again."""
        for base in reversed(self._bases):
            if base.text and ids.data.startswith(base.ids):
                return TokenText.of(ids[len(base.ids) // _TOKEN_BYTES :].tolist(), behind=base.text)
        return TokenText.of(ids.tolist())

    def prompt(self, ids: TokenColumn) -> PromptDelta:
        """The prompt against the call that shares the longest prefix (ties: the latest)."""
        best, kept = None, 0
        for base in reversed(self._bases):
            if min(len(base.ids), len(ids.data)) > kept * _TOKEN_BYTES:
                shared = common_prefix(base.ids, ids.data)
                if shared > kept:
                    best, kept = base.seq, shared
        return PromptDelta(base_call=best, kept=kept, new_ids=ids[kept:])

    def messages(self, messages: EncodedMessages) -> MessagesDelta:
        """The messages against the call that shares most of them (ties: the latest)."""
        best, kept = None, 0
        for base in reversed(self._bases):
            if min(len(base.marks), len(messages.marks)) > kept:
                shared = _common_messages(base.marks, messages.marks)
                if shared > kept:
                    best, kept = base.seq, shared
        return MessagesDelta(
            base_call=best, kept=kept, new=messages.messages[kept:], digest=digest(*messages.marks)
        )

    def tools(self, tools: EncodedTools) -> ToolsDelta:
        """The tools, in full only the first time."""
        is_known = tools.digest in self._tool_lists
        return ToolsDelta(digest=tools.digest, tools=None if is_known else tools.tools)

    def remember(
        self,
        seq: int,
        prompt: TokenColumn,
        sampled: TokenColumn,
        text: bytes,
        messages: EncodedMessages,
        tools: ToolsDelta,
    ) -> None:
        """Make a recorded call a base for later ones; `text`: prompt and sampled ids, or empty."""
        new = _Base(seq, prompt.data + sampled.data, text, messages.marks)
        needed = [base for base in self._bases if not base.says_no_more_than(new)]
        self._bases = [*needed[1 - BASES :], new]
        if tools.tools is not None and len(self._tool_lists) < MAX_TOOL_LISTS:
            self._tool_lists.add(tools.digest)


def common_prefix(a: bytes, b: bytes) -> int:
    """Leading items that two packed columns share, by bisection over memory compares."""
    low, high = 0, min(len(a), len(b)) // _TOKEN_BYTES
    if a.startswith(b) or b.startswith(a):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low * _TOKEN_BYTES : middle * _TOKEN_BYTES] == b[low * _TOKEN_BYTES : middle * _TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low


def _common_messages(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    shared = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        shared += 1
    return shared
