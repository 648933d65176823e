"""Segment files: raw records, length-framed inside one zstd stream.

A frame is `length` (u32) and a body of that many bytes, all integers little-endian:

    offset i64 | timestamp_ms i64 | key | value | headers u32, then (name, value) each

where a byte string is its length (i32, -1 for none) and its bytes. A file holds consecutive
records of one partition. Bytes of keys and values are kept exactly, so digests survive.
"""

import hashlib
import io
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import zstandard

from polar.core.stage import Partition
from polar.errors import LogError
from polar.kafka.records import RawRecord

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<qq")
_SIZE = struct.Struct("<i")
_LEVEL = 3


class BrokenSegmentError(LogError):
    """A segment file is cut short or was changed."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One file, as the archive's manifest lists it."""

    file: str
    """Path inside the archive."""
    topic: str
    """Suffix in schemas.topics."""
    partition: int
    first_offset: int
    last_offset: int
    records: int
    sha256: str
    """Over the bytes of the file."""


class SegmentWriter:
    """One segment file that grows; it has its final name only when it is whole."""

    def __init__(self, folder: Path, partition: Partition) -> None:
        self._folder = folder
        self._partition = partition
        self._draft = folder / f"{partition.topic}-{partition.number}.draft"
        self._file = self._draft.open("wb")
        self._stream = zstandard.ZstdCompressor(level=_LEVEL).stream_writer(self._file)
        self._count, self._first, self._last = 0, -1, -1

    def append(self, record: RawRecord) -> None:
        """Add the next record of the partition."""
        body = _pack(record)
        self._stream.write(_LENGTH.pack(len(body)))
        self._stream.write(body)
        self._count, self._last = self._count + 1, record.offset
        self._first = record.offset if self._first < 0 else self._first

    def sync(self) -> None:
        """What was appended survives the end of the machine, in the draft."""
        self._stream.flush(zstandard.FLUSH_BLOCK)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> Segment | None:
        """Give the file its name; without records there is no file, and None."""
        self._stream.flush(zstandard.FLUSH_FRAME)
        self._file.close()
        if not self._count:
            self._draft.unlink()
            return None
        partition = self._partition
        name = f"{partition.topic}-{partition.number}-{self._first:020d}.seg.zst"
        digest = file_sha256(self._draft)
        self._draft.replace(self._folder / name)
        return Segment(name, partition.topic, partition.number, self._first, self._last, self._count, digest)


def write_segment(folder: Path, partition: Partition, records: Iterable[RawRecord]) -> Segment:
    """Write records of one partition, in order of offsets; at least one."""
    writer = SegmentWriter(folder, partition)
    for record in records:
        writer.append(record)
    segment = writer.close()
    if segment is None:
        raise ValueError("a segment holds at least one record")
    return segment


def read_segment(folder: Path, segment: Segment) -> Iterator[RawRecord]:
    """The records of a segment. Raises BrokenSegmentError when the file is not what was written."""
    path = folder / segment.file
    if not path.is_file():
        raise BrokenSegmentError(f"{path} is missing")
    if file_sha256(path) != segment.sha256:
        raise BrokenSegmentError(f"{path}: the digest is not the one in the archive's manifest")
    partition = Partition(segment.topic, segment.partition)
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as raw:
        stream = io.BufferedReader(raw)
        while head := stream.read(_LENGTH.size):
            yield _unpack(partition, _exactly(stream, _LENGTH.unpack(head)[0], path))


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _exactly(stream: IO[bytes], size: int, path: Path) -> bytes:
    body = stream.read(size)
    if len(body) != size:
        raise BrokenSegmentError(f"{path} ends inside a record")
    return body


def _pack(record: RawRecord) -> bytes:
    parts = [_HEAD.pack(record.offset, record.timestamp_ms), _sized(record.key), _sized(record.value)]
    parts.append(_LENGTH.pack(len(record.headers)))
    for name, value in record.headers.items():
        parts += [_sized(name.encode()), _sized(value.encode())]
    return b"".join(parts)


def _sized(data: bytes | None) -> bytes:
    return _SIZE.pack(-1) if data is None else _SIZE.pack(len(data)) + data


def _unpack(partition: Partition, body: bytes) -> RawRecord:
    offset, timestamp = _HEAD.unpack_from(body)
    at = _HEAD.size
    key, at = _take(body, at)
    value, at = _take(body, at)
    (count,) = _LENGTH.unpack_from(body, at)
    at += _LENGTH.size
    headers = {}
    for _ in range(count):
        name, at = _take(body, at)
        text, at = _take(body, at)
        headers[(name or b"").decode()] = (text or b"").decode()
    return RawRecord(partition, offset, key, value, headers, timestamp)


def _take(body: bytes, at: int) -> tuple[bytes | None, int]:
    (size,) = _SIZE.unpack_from(body, at)
    at += _SIZE.size
    return (None, at) if size < 0 else (body[at : at + size], at + size)
