"""The spool's files: frames appended to numbered segments.

| frame | holds |
|---|---|
| first of a segment | the state that all older segments add up to, so that they may go |
| any other | one change: a JSON head and blobs behind it |

    frame = size of head+blobs (uint32), their checksum (uint64), size of head (uint32, all little-endian),
            head, blobs

Invariants: a change is there whole or not at all, since a frame that is cut off or damaged ends
its segment; a segment appears under its name only with its first frame; frames are never changed.
A file whose segment is not needed any more is written over as a later one, which costs the kernel half
of what new pages cost it; checksums begin with the segment's number, so what stood there before is damage.
A frame survives the end of the process once `append` returned, the end of the machine after `fsync`.
"""

import contextlib
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from polar.gateway.checksums import checksum

_FRAME = struct.Struct("<IQI")
_NAME = "segment-"
_SPARE = f"{_NAME}spare.draft"


@dataclass(frozen=True, slots=True)
class Blob:
    """Where a blob lies."""

    segment: int
    offset: int
    size: int


@dataclass(slots=True)
class _Segment:
    number: int
    path: Path
    descriptor: int
    size: int
    """Where the next frame goes; negative in segments of an earlier process, which are only read."""
    is_synced: bool = False


class Journal:
    """Segments in one folder. Only `fsync` and `release` may be called from other threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segments: dict[int, _Segment] = {}
        """By number, in order."""
        self._table = threading.Lock()
        """Held while segments come and go, never during disk work."""
        self._disk = threading.Lock()
        """Held while descriptors are synced or closed."""
        self._has_new_names = False
        """Segments were added whose names are not on the disk yet."""
        self._spare: Path | None = None
        """The file of a released segment."""
        for draft in folder.glob(f"{_NAME}*.draft"):
            draft.unlink()
        for path in sorted(folder.glob(f"{_NAME}*")):
            self._add(int(path.name.removeprefix(_NAME)), path, size=-1)

    @property
    def segment(self) -> int:
        """Number of the segment that is written to; 0 while there is none."""
        return next(reversed(self._segments), 0)

    @property
    def oldest(self) -> int:
        """Number of the oldest segment."""
        return next(iter(self._segments), 0)

    @property
    def segment_bytes(self) -> int:
        """Size of the segment that is written to."""
        return self._segments[self.segment].size

    def frames(self) -> Iterator[tuple[Mapping[str, Any], list[Blob]]]:
        """(head, blobs) of all whole frames, oldest first; the head names the blobs' `sizes`."""
        for segment in self._segments.values():
            offset = 0
            while (frame := self._read_frame(segment, offset)) is not None:
                head, begin, end = frame
                blobs = []
                for size in head.get("sizes", ()):
                    blobs.append(Blob(segment.number, begin, size))
                    begin += size
                yield head, blobs
                offset = end

    def append(self, head: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> list[Blob]:
        """Write one change; where its blobs lie. Raises OSError, and then nothing was written."""
        segment = self._segments[self.segment]
        if segment.size < 0:
            raise RuntimeError("a journal that was opened again goes on in a new segment")
        packed, begin = _pack(segment.number, head, blobs)
        written = os.pwritev(segment.descriptor, [packed, *blobs], segment.size)
        if written != begin + sum(map(len, blobs)):
            # The next frame is written over it.
            raise OSError(28, f"{segment.path.name} took only a part of a change; is the disk full?")
        places, offset = [], segment.size + begin
        for blob in blobs:
            places.append(Blob(segment.number, offset, len(blob)))
            offset += len(blob)
        segment.size += written
        segment.is_synced = False
        return places

    def read(self, blob: Blob) -> bytes:
        """A blob's bytes."""
        return os.pread(self._segments[blob.segment].descriptor, blob.size, blob.offset)

    def begin_segment(self, state: Mapping[str, Any]) -> None:
        """Go on in a new segment that starts with this state. Raises OSError, and then nothing changed."""
        number = self.segment + 1
        path = self._folder / f"{_NAME}{number:010d}"
        packed, size = _pack(number, state, ())
        with self._table:
            spare, self._spare = self._spare, None
        draft = spare or path.with_suffix(".draft")
        try:
            with draft.open("r+b" if spare else "wb") as file:
                file.write(packed)
            draft.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        self._add(number, path, size)

    def fsync(self) -> None:
        """Everything appended so far survives the end of the machine. Blocks."""
        with self._disk:
            self._sync()

    def release(self, first: int) -> None:
        """Let the segments before number `first` go, once what came after is on the disk. Blocks."""
        with self._disk:
            # What goes need not be on the disk: megabytes of a segment that is full by now.
            self._sync(first)
            with self._table:
                released = [self._segments.pop(number) for number in list(self._segments) if number < first]
            for segment in released:
                os.close(segment.descriptor)
                if self._spare is None:
                    spare = self._folder / _SPARE
                    segment.path.rename(spare)
                    with self._table:
                        self._spare = spare
                else:
                    segment.path.unlink()

    def close(self) -> None:
        """Let go of the files."""
        with self._disk, self._table:
            for segment in self._segments.values():
                os.close(segment.descriptor)
            self._segments.clear()

    def _add(self, number: int, path: Path, size: int) -> None:
        descriptor = os.open(path, os.O_RDWR)
        with self._table:
            self._segments[number] = _Segment(number, path, descriptor, size)
            self._has_new_names = True

    def _sync(self, first: int = 0) -> None:
        with self._table:
            segments = [
                segment
                for number, segment in self._segments.items()
                if number >= first and not segment.is_synced
            ]
            has_new_names, self._has_new_names = self._has_new_names, False
        for segment in segments:
            # Before the work: what is appended meanwhile takes the mark away again.
            segment.is_synced = True
            try:
                os.fsync(segment.descriptor)
            except OSError:
                segment.is_synced = False
                raise
        if has_new_names:
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _read_frame(self, segment: _Segment, offset: int) -> tuple[Mapping[str, Any], int, int] | None:
        """(head, where its blobs begin, where it ends); none at the end or at a damaged frame."""
        fixed = os.pread(segment.descriptor, _FRAME.size, offset)
        if len(fixed) < _FRAME.size:
            return None
        size, digest, head_size = _FRAME.unpack(fixed)
        if size > os.fstat(segment.descriptor).st_size - offset:
            return None  # what stood there before may name any size, and room is made before it is read
        content = os.pread(segment.descriptor, size, offset + _FRAME.size)
        if len(content) < size or checksum(content, seed=segment.number) != digest:
            return None
        begin = offset + _FRAME.size
        return orjson.loads(content[:head_size]), begin + head_size, begin + size


def _pack(number: int, head: Mapping[str, Any], blobs: Sequence[bytes]) -> tuple[bytes, int]:
    """(frame of a segment without its blobs, its size). Blobs are named in the head by their sizes."""
    text = orjson.dumps({**head, "sizes": [len(blob) for blob in blobs]} if blobs else head)
    size = len(text) + sum(map(len, blobs))
    packed = _FRAME.pack(size, checksum(text, *blobs, seed=number), len(text)) + text
    return packed, len(packed)
