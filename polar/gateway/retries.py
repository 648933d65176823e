"""Requests that come again: they join the call that is under way, or get its answer once more.

| the same body comes again | then |
|---|---|
| while the first call is under way | it joins: one call, one record, both clients get the answer |
| after the answer was lost on its way | the same answer again, byte for byte |
| after the answer was delivered, marked as a retry by its SDK | the same: its client did not get it |
| after the answer was delivered | a new call: the harness wants another sample |
| after a failure | a new call |

Invariants: what is kept is bounded in bytes and in age; when it is gone, the request is a new
call. A sample that was wanted twice is never answered from here: only the latest call of a body
counts, and every new one takes the place of the one before.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from polar.core.dialects.base import DialectName, Headers, ModelRequest
from polar.gateway.answers import Answer

_ENTRY_BYTES = 512
"""Counted for an answer beside its text."""
_RETRY_COUNT = b"x-stainless-retry-count"

Key = tuple[str, DialectName, str, bool, str]
"""(session, dialect, model, stream, digest of the body): some dialects name model and form in the URL."""


def retry_key(session_id: str, request: ModelRequest) -> Key:
    """Equal keys are the same request of one session."""
    return session_id, request.dialect, request.model, request.stream, request.digest


def is_marked(headers: Headers) -> bool:
    """Whether the client's SDK says that it sends this body again because it got no answer."""
    count = headers.get(_RETRY_COUNT, b"0")
    return count.isdigit() and int(count) > 0


@dataclass(slots=True)
class _Entry:
    key: Key
    answer: Answer
    size_bytes: int = _ENTRY_BYTES
    ended_at: float = 0.0


@dataclass(slots=True)
class Retries:
    """The latest answers of all sessions, as far as they fit."""

    max_bytes: int
    max_seconds: float
    """An answer is kept so long after its end; 0 joins and repeats nothing."""
    kept_bytes: int = 0
    num_joined: int = 0
    num_repeated: int = 0
    _by_session: dict[str, dict[Key, _Entry]] = field(default_factory=dict)
    _ended: "OrderedDict[Key, _Entry]" = field(default_factory=OrderedDict)
    """Those that are over, the oldest first."""

    @property
    def num_kept(self) -> int:
        """Answers under way or over."""
        return sum(map(len, self._by_session.values()))

    def find(self, key: Key, *, is_marked: bool) -> Answer | None:
        """The answer that a request is to get in place of a call of its own."""
        self._expire()
        entry = self._by_session.get(key[0], {}).get(key)
        if entry is None:
            return None
        answer = entry.answer
        if answer.failure is not None or answer.is_abandoned or not answer.is_kept:
            return None
        if not answer.is_over:
            self.num_joined += 1
            return answer
        if answer.is_delivered and not is_marked:
            return None
        self.num_repeated += 1
        return answer

    def begin(self, key: Key, answer: Answer) -> None:
        """A call of its own: its answer takes the place of an earlier one."""
        if self.max_seconds <= 0:
            answer.stop_keeping()
            return
        mine = self._by_session.setdefault(key[0], {})
        if (earlier := mine.get(key)) is not None:
            self._drop(earlier)
            mine = self._by_session.setdefault(key[0], {})
        entry = mine[key] = _Entry(key, answer)
        self.kept_bytes += _ENTRY_BYTES

        def grown(_: Answer, size: int) -> None:
            entry.size_bytes += size
            self.kept_bytes += size
            if self.kept_bytes > self.max_bytes:
                self._make_room(entry)

        answer.keep(grown)

    def end(self, key: Key, answer: Answer) -> None:
        """Nothing more will be said; only a whole answer is worth keeping."""
        entry = self._by_session.get(key[0], {}).get(key)
        if entry is None or entry.answer is not answer:
            return
        if answer.is_over and answer.failure is None:
            entry.ended_at = time.monotonic()
            self._ended[key] = entry
        else:
            self._drop(entry)

    def forget(self, session_id: str) -> None:
        """Drop what is over of a session: it was sealed, or one of its requests was refused unread."""
        for entry in list(self._by_session.get(session_id, {}).values()):
            if entry.key in self._ended:
                self._drop(entry)

    def _expire(self) -> None:
        before = time.monotonic() - self.max_seconds
        while self._ended and (entry := next(iter(self._ended.values()))).ended_at < before:
            self._drop(entry)

    def _make_room(self, growing: _Entry) -> None:
        while self.kept_bytes > self.max_bytes and self._ended:
            self._drop(next(iter(self._ended.values())))
        if self.kept_bytes > self.max_bytes:
            self._drop(growing)

    def _drop(self, entry: _Entry) -> None:
        mine = self._by_session[entry.key[0]]
        del mine[entry.key]
        if not mine:
            del self._by_session[entry.key[0]]
        self._ended.pop(entry.key, None)
        self.kept_bytes -= entry.size_bytes
        entry.answer.stop_keeping()
