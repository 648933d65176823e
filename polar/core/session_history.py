"""What the records of a session are delta-encoded against: a few earlier calls, and its tool lists.

Bounded, and dispensable: without a history the same record comes out whole.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from polar.core.token_text import TokenText, common_prefix
from schemas.base import canonical_json, digest, shrunk

BASES = 8
"""Earlier calls that are tried as a base: enough for a few interleaved sub-agents."""
MAX_TOOL_LISTS = 64


@dataclass(frozen=True, slots=True)
class EncodedMessages:
    """A request's messages with what the history and the record need of them."""

    texts: tuple[bytes, ...]
    """Canonical JSON of each."""
    marks: tuple[bytes, ...]
    """SHA-256 of each text."""

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]]) -> "EncodedMessages":
        """Encode each once."""
        texts = tuple([shrunk(canonical_json(message)) for message in messages])
        return cls(texts, tuple([hashlib.sha256(text).digest() for text in texts]))

    @property
    def digest(self) -> str:
        """Of the whole list."""
        return digest(*self.marks)

    @property
    def text(self) -> bytes:
        """Canonical JSON of the list."""
        return b"[" + b",".join(self.texts) + b"]"


@dataclass(frozen=True, slots=True)
class EncodedTools:
    """A request's tools with what the history and the record need of them."""

    digest: str
    text: bytes
    """Canonical JSON of the list."""
    given: bytes
    """The list with its keys in the order in which they came, which chat templates show to the model."""

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> "EncodedTools":
        """Encode them, or find them encoded."""
        return _encoded_tools(shrunk(orjson.dumps(tools)))


@lru_cache(maxsize=MAX_TOOL_LISTS)
def _encoded_tools(data: bytes) -> EncodedTools:
    """The same list comes with every call, also of other sessions; its canonical form costs far
    more than this look-up."""
    texts = [canonical_json(tool) for tool in orjson.loads(data)]
    return EncodedTools(digest(*texts), b"[" + b",".join(texts) + b"]", data)


@dataclass(frozen=True, slots=True)
class Delta:
    """A prompt's ids, or messages, against those of an earlier call."""

    base: int | None
    """seq of that call."""
    kept: int
    """Leading ids or messages that are the same."""
    new: TokenText = field(default_factory=lambda: TokenText(b"", 0))
    """Ids behind them; of messages nothing."""


@dataclass(frozen=True, slots=True)
class _Base:
    seq: int
    ids: TokenText
    """Prompt + sampled."""
    marks: tuple[bytes, ...]
    """Of the request's messages."""

    @property
    def size_bytes(self) -> int:
        return len(self.ids.text) + 64 * len(self.marks)

    def says_no_more_than(self, other: "_Base") -> bool:
        """Whether every later call shares at least as much with the other."""
        return other.ids.begins_with(self.ids.text) and other.marks[: len(self.marks)] == self.marks


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

    def prompt(self, ids: TokenText) -> Delta | None:
        """The prompt against the call that shares the longest prefix (ties: the latest).

        None when there is something else than ids behind it.
        """
        best: _Base | None = None
        shared = 0
        for base in reversed(self._bases):
            if min(len(base.ids.text), len(ids.text)) > shared:
                size = common_prefix(base.ids.text, ids.text)
                if size > shared:
                    best, shared = base, size
        if best is None:
            return Delta(None, 0, ids) if ids.is_sound() else None
        text = best.ids.text[:shared]
        kept = len(best.ids) if len(text) == len(best.ids.text) else text.count(b",") + 1
        new = TokenText(ids.text[shared + 1 :])
        return Delta(best.seq, kept, new) if new.is_sound() else None

    def messages(self, messages: EncodedMessages) -> Delta:
        """The messages against the call that shares most of them (ties: the latest)."""
        best, kept = None, 0
        for base in reversed(self._bases):
            if min(len(base.marks), len(messages.marks)) > kept:
                shared = _common_messages(base.marks, messages.marks)
                if shared > kept:
                    best, kept = base.seq, shared
        return Delta(best, kept)

    def knows_tools(self, tools: EncodedTools) -> bool:
        """Whether a record of the session holds this list in full."""
        return tools.digest in self._tool_lists

    def remember(self, seq: int, ids: TokenText, messages: EncodedMessages, tools: EncodedTools) -> None:
        """Make a recorded call a base for later ones; `ids`: prompt and sampled."""
        new = _Base(seq, ids, messages.marks)
        needed = [base for base in self._bases if not base.says_no_more_than(new)]
        self._bases = [*needed[1 - BASES :], new]
        if len(self._tool_lists) < MAX_TOOL_LISTS:
            self._tool_lists.add(tools.digest)


def _common_messages(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    if a == b[: len(a)]:
        return len(a)
    shared = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        shared += 1
    return shared
