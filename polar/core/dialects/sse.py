"""Server-sent events: bytes in any split → events.

Invariant: the events are a function of the concatenated bytes; where a read ends (inside a
character, a field name, or between CR and LF) never matters.

The standard has a reader skip fields that it does not know. Engines send none, so such a line is a
`data` line that was damaged on its way, and to skip it would lose tokens out of the middle.
"""

from typing import NamedTuple

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""A line or event above this is an error: memory stays bounded whatever an engine sends."""

_BOM = b"\xef\xbb\xbf"
_IGNORED_FIELDS = (b"", b"id", b"retry")
"""Comments have no name."""


class SseError(ValueError):
    """The bytes are no acceptable event stream."""


class SseEvent(NamedTuple):
    """One event: `data` lines joined by LF, and the `event` field (empty: a message)."""

    data: bytes
    name: str = ""


class SseDecoder:
    """Incremental decoder of one stream."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._limit = max_event_bytes
        self._pending = bytearray()
        self._scanned = 0
        self._after_cr = False
        self._at_start = True
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._name = ""

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Events that are complete with these bytes. Raises SseError."""
        if not chunk:
            return []
        if (plain := self._plain_events(chunk)) is not None:
            return plain
        if self._after_cr:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        self._pending += chunk
        events: list[SseEvent] = []
        begin = 0
        while (found := _line_end(self._pending, self._scanned)) is not None:
            end, self._scanned = found
            line = bytes(self._pending[begin:end])
            begin = self._scanned
            # A CR at the very end may be the first half of CRLF: the LF is dropped when it comes.
            self._after_cr = begin == len(self._pending) and self._pending.endswith(b"\r")
            self._on_line(line, events)
        del self._pending[:begin]
        self._scanned = len(self._pending)
        if len(self._pending) > self._limit:
            raise SseError(f"a line of the event stream is over {self._limit} bytes")
        return events

    def _plain_events(self, chunk: bytes) -> list[SseEvent] | None:
        """The events of a read as engines write them: whole events of one `data` line; None for others."""
        in_between = self._after_cr or self._pending or self._data or self._name
        if in_between or not chunk.startswith(b"data: ") or not chunk.endswith(b"\n\n"):
            return None
        if b"\r" in chunk or len(chunk) > self._limit:
            return None
        if chunk.find(b"\n") == len(chunk) - 2:
            self._at_start = False
            return [SseEvent(chunk[6:-2])]
        blocks = chunk[:-2].split(b"\n\n")
        for block in blocks:
            if not block.startswith(b"data: ") or b"\n" in block:
                return None
        self._at_start = False
        return [SseEvent(block[6:]) for block in blocks]

    def finish(self) -> list[SseEvent]:
        """Events that only lack their closing blank line when the stream ends cleanly."""
        events: list[SseEvent] = []
        if self._pending:
            self._on_line(bytes(self._pending), events)
            self._pending.clear()
            self._scanned = 0
        self._on_line(b"", events)
        return events

    def _on_line(self, line: bytes, events: list[SseEvent]) -> None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            if self._data:
                events.append(SseEvent(b"\n".join(self._data), self._name))
            self._data, self._data_bytes, self._name = [], 0, ""
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data_bytes += len(value)
            if self._data_bytes > self._limit:
                raise SseError(f"an event of the stream is over {self._limit} bytes")
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field not in _IGNORED_FIELDS:
            raise SseError(f"the event stream has a line that is no field of one: {line[:40]!r}")


def _line_end(data: bytearray, begin: int) -> tuple[int, int] | None:
    """(where the line ends, where the next one begins). A search for each byte is many times as fast
    as a pattern, and the first event of an answer holds all ids of its prompt."""
    lf = data.find(b"\n", begin)
    cr = data.find(b"\r", begin, len(data) if lf < 0 else lf)
    if cr < 0:
        return None if lf < 0 else (lf, lf + 1)
    return cr, cr + 1 + (lf == cr + 1)


def frame(data: bytes) -> bytes:
    """One message event. `data` must hold no line end (JSON text does not)."""
    return b"data: " + data + b"\n\n"
