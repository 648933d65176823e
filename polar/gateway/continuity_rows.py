"""What a restart needs to continue the calls of open sessions: rows in files of all sessions together.

    row = size of session id + bytes (uint32), their checksum (uint64), size of session id (uint32, all
          little-endian), session id, bytes

Rows are written behind the records that they belong to, and nothing waits for the disk: a row that
is lost costs the next call of its session a full rendering. A file takes rows up to SEGMENT_BYTES,
and goes when no open session has rows in it.
"""

import logging
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar.gateway.checksums import checksum

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 32 * 1024 * 1024
_HEAD = struct.Struct("<IQI")
_NAME = "rows-"


@dataclass(frozen=True, slots=True)
class _Place:
    segment: int
    offset: int
    size: int
    digest: int
    skipped: int
    """Bytes of the session id in front of the row."""


class ContinuityRows:
    """The files of one gateway, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._places: dict[str, list[_Place]] = {}
        """Of each open session's rows, in order."""
        self._sessions: Counter[int] = Counter()
        """Sessions with rows in a segment."""
        self._descriptors: dict[int, int] = {}
        """Open files by segment; the last one is written to."""
        self._size = 0
        """Of the segment that is written to."""
        for path in sorted(folder.glob(f"{_NAME}*")):
            number = int(path.name.removeprefix(_NAME))
            self._open(number)
            for session_id, place in self._scan(number):
                self._note(session_id, place)

    def append(self, session_id: str, rows: Sequence[bytes]) -> None:
        """Add rows. A disk that refuses costs the session its rows, not the call."""
        try:
            for row in rows:
                self._append(session_id, row)
        except OSError as error:
            logger.warning("session_id=%s cannot be continued after a restart: %s", session_id, error)
            self.drop(session_id)

    def read(self, session_id: str) -> list[bytes]:
        """All rows up to the first damaged one; those behind it are forgotten."""
        rows: list[bytes] = []
        places = self._places.get(session_id, [])
        for place in places:
            data = os.pread(self._descriptors[place.segment], place.size, place.offset)
            if len(data) != place.size or checksum(data) != place.digest:
                logger.warning("session_id=%s: a damaged row and what follows it are dropped", session_id)
                del places[len(rows) :]
                break
            rows.append(data[place.skipped :])
        return rows

    def drop(self, session_id: str) -> None:
        """The session needs its rows no more."""
        places = self._places.pop(session_id, ())
        for segment in {place.segment for place in places}:
            self._sessions[segment] -= 1
            self._release(segment)

    def sweep(self, open_sessions: Iterable[str]) -> int:
        """Drop the rows of all other sessions; returns of how many."""
        others = self._places.keys() - set(open_sessions)
        for session_id in others:
            self.drop(session_id)
        for segment in list(self._descriptors):
            self._release(segment)
        return len(others)

    def close(self) -> None:
        """Let go of the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _append(self, session_id: str, row: bytes) -> None:
        name = session_id.encode()
        digest = checksum(name, row)
        size = len(name) + len(row)
        segment = next(reversed(self._descriptors), 0)
        if not segment or self._size >= SEGMENT_BYTES:
            full, segment = segment, segment + 1
            self._open(segment)
            self._release(full)
        head = _HEAD.pack(size, digest, len(name))
        written = os.writev(self._descriptors[segment], [head, name, row])
        if written != _HEAD.size + size:
            os.ftruncate(self._descriptors[segment], self._size)
            raise OSError(28, f"{_NAME}{segment} took only a part of a row; is the disk full?")
        place = _Place(segment, self._size + _HEAD.size, size, digest, len(name))
        self._size += written
        self._note(session_id, place)

    def _note(self, session_id: str, place: _Place) -> None:
        places = self._places.setdefault(session_id, [])
        if not places or places[-1].segment != place.segment:
            self._sessions[place.segment] += 1
        places.append(place)

    def _open(self, segment: int) -> None:
        path = self._path(segment)
        self._descriptors[segment] = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._size = path.stat().st_size

    def _scan(self, segment: int) -> Iterator[tuple[str, _Place]]:
        """Whole rows of a file; it ends behind them from now on."""
        data = self._path(segment).read_bytes()
        at = 0
        while at + _HEAD.size <= len(data):
            size, digest, skipped = _HEAD.unpack_from(data, at)
            begin, end = at + _HEAD.size, at + _HEAD.size + size
            if end > len(data) or skipped > size or checksum(data[begin:end]) != digest:
                break
            yield data[begin : begin + skipped].decode(), _Place(segment, begin, size, digest, skipped)
            at = end
        if at < len(data):
            logger.warning("%s: a damaged row and what follows it are dropped", self._path(segment).name)
            os.ftruncate(self._descriptors[segment], at)
            self._size = at

    def _release(self, segment: int) -> None:
        """Delete a file that no session has rows in; the one that is written to is emptied."""
        if self._sessions[segment] > 0 or segment not in self._descriptors:
            return
        try:
            if segment == next(reversed(self._descriptors)):
                os.ftruncate(self._descriptors[segment], 0)
                self._size = 0
                return
            os.close(self._descriptors.pop(segment))
            self._path(segment).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s stays: %s", self._path(segment).name, error)

    def _path(self, segment: int) -> Path:
        return self._folder / f"{_NAME}{segment:010d}"
