"""What a restart needs to continue the calls of open sessions: one file of rows per session.

    row = its size, CRC-32 of it (uint32 each, little-endian), its bytes

Rows are written behind the records that they belong to, and nothing waits for the disk: a row that
is lost costs the next call of its session a full rendering. A file goes when its session is sealed.
"""

import contextlib
import hashlib
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<II")


class ContinuityRows:
    """The files of one gateway, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def append(self, session_id: str, rows: Sequence[bytes]) -> None:
        """Add rows. A disk that refuses costs the session its rows, not the call."""
        if not rows:
            return
        data = b"".join([_HEAD.pack(len(row), zlib.crc32(row)) + row for row in rows])
        try:
            _append(self._path(session_id), data)
        except OSError as error:
            logger.warning("session_id=%s cannot be continued after a restart: %s", session_id, error)
            self.drop(session_id)

    def read(self, session_id: str) -> list[bytes]:
        """All rows up to the first damaged one; the file ends there from now on."""
        path = self._path(session_id)
        try:
            data = path.read_bytes()
        except OSError:
            return []
        rows: list[bytes] = []
        at = 0
        while at + _HEAD.size <= len(data):
            size, checksum = _HEAD.unpack_from(data, at)
            row = data[at + _HEAD.size : at + _HEAD.size + size]
            if len(row) != size or zlib.crc32(row) != checksum:
                break
            rows.append(row)
            at += _HEAD.size + size
        if at < len(data):
            logger.warning("session_id=%s: a damaged row and what follows it are dropped", session_id)
            os.truncate(path, at)
        return rows

    def drop(self, session_id: str) -> None:
        """The session needs its rows no more."""
        try:
            self._path(session_id).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("session_id=%s keeps its file of rows: %s", session_id, error)

    def sweep(self, open_sessions: Iterable[str]) -> int:
        """Delete the files of all other sessions; returns how many."""
        kept = {self._path(session_id).name for session_id in open_sessions}
        others = [path for path in self._folder.iterdir() if path.name not in kept]
        for path in others:
            with contextlib.suppress(OSError):  # the next sweep finds it again
                path.unlink(missing_ok=True)
        return len(others)

    def _path(self, session_id: str) -> Path:
        # Ids hold slashes; what stands in the folder says nothing of tasks.
        return self._folder / hashlib.sha256(session_id.encode()).hexdigest()[:32]


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        written = os.write(descriptor, data)
    finally:
        os.close(descriptor)
    if written != len(data):
        raise OSError(28, f"{path.name} took only a part of a row; is the disk full?")
