"""The durable spool: SQLite in WAL mode, one file per gateway.

| table | holds | until |
|---|---|---|
| sessions | key opened, next seq, sealed | a day after the key expired |
| reserved | numbers given to calls that have no record yet | their record is spooled |
| records | events of polar.calls.v1, in the order they happened | the broker's acknowledgement |

Invariant: a number leaves `reserved` in the transaction that puts its record into `records`,
so every number has exactly one record, whenever the process dies. A commit survives the end
of the process at once, and the end of the machine after `fsync`. One thread (the event loop)
uses the main connection; `fsync` and `checkpoint` have handles of their own for other threads.
"""

import fcntl
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polar.errors import SettingsError
from schemas.base import encode
from schemas.calls import CallRecord, SessionOpened, SessionSealed

FORGET_SECONDS = 24 * 3600
"""A session is remembered so long after its key expired: it may be sealed late, or twice."""

CHECKPOINT_BYTES = 16 * 1024 * 1024
"""At so many bytes of new events the write-ahead log should be moved into the database."""

_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY, group_id TEXT NOT NULL, expires_at REAL NOT NULL,
    next_seq INTEGER NOT NULL DEFAULT 1, sampled_tokens INTEGER NOT NULL DEFAULT 0,
    opened_record INTEGER NOT NULL, sealed_record INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reserved (
    session_id TEXT NOT NULL, seq INTEGER NOT NULL, info BLOB NOT NULL, PRIMARY KEY (session_id, seq)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL,
    borders INTEGER NOT NULL, event BLOB NOT NULL
);
"""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as the spool knows it."""

    session_id: str
    group_id: str
    expires_at: float
    next_seq: int
    sampled_tokens: int
    """Of all its records."""
    opened_record: int
    """Spool id of its SessionOpened."""
    sealed_record: int | None
    """Spool id of its SessionSealed; none while it is open."""


@dataclass(frozen=True, slots=True)
class SpooledRecord:
    """An event that the broker has not acknowledged."""

    id: int
    session_id: str
    borders: bool
    """It opens or closes its session: its neighbours of the same session wait for it."""
    data: bytes


class Spool:
    """See the module. All methods but `fsync` and `checkpoint` belong to the event loop's thread."""

    def __init__(self, folder: Path) -> None:
        """Open or make the spool in `folder`. Raises SettingsError when another process has it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise SettingsError(
                f"spool {folder} is in use: give each gateway an id of its own (POLAR_GATEWAY_ID)"
            ) from error
        path = folder / "spool.sqlite"
        self._main = sqlite3.connect(path, isolation_level=None)
        self._main.execute("PRAGMA journal_mode=WAL")
        self._main.execute("PRAGMA synchronous=NORMAL")
        # A checkpoint inside a commit would stall the event loop for its fsyncs.
        self._main.execute("PRAGMA wal_autocheckpoint=0")
        self._main.execute(f"PRAGMA journal_size_limit={CHECKPOINT_BYTES * 4}")
        self._main.executescript(_TABLES)
        self._checkpointer = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.num_records, self.size_bytes = self._main.execute(
            "SELECT count(*), coalesce(sum(length(event)), 0) FROM records"
        ).fetchone()
        self._unchecked_bytes = 0
        self._wal = os.open(f"{path}-wal", os.O_RDONLY)  # made by the read above
        directory = os.open(folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def close(self) -> None:
        """Release the file; what is in it stays."""
        self._checkpointer.close()
        self._main.close()
        os.close(self._wal)
        self._lock.close()

    def session(self, session_id: str) -> SessionRow | None:
        """What is known of a session."""
        row = self._main.execute(
            "SELECT session_id, group_id, expires_at, next_seq, sampled_tokens, opened_record, sealed_record"
            " FROM sessions WHERE session_id = ?",
            (session_id,),
        ).fetchone()
        return None if row is None else SessionRow(*row)

    def open_sessions(self, limit: int) -> list[str]:
        """Ids of unsealed sessions."""
        rows = self._main.execute(
            "SELECT session_id FROM sessions WHERE sealed_record IS NULL ORDER BY session_id LIMIT ?",
            (limit,),
        )
        return [session_id for (session_id,) in rows]

    def count_open(self) -> int:
        """Number of unsealed sessions."""
        return int(
            self._main.execute("SELECT count(*) FROM sessions WHERE sealed_record IS NULL").fetchone()[0]
        )

    def open_session(self, event: SessionOpened, expires_at: float) -> int:
        """Add a session and its opening record; returns the record's id."""
        data = encode(event)
        with self._main:
            self._main.execute("BEGIN")
            record_id = self._append(event.session_id, data, borders=True)
            self._main.execute(
                "INSERT INTO sessions (session_id, group_id, expires_at, opened_record) VALUES (?, ?, ?, ?)",
                (event.session_id, event.group_id, expires_at, record_id),
            )
        self._count([data])
        return record_id

    def reserve(self, session_id: str, infos: Sequence[bytes]) -> int:
        """Give the next numbers of an open session to calls; returns the first number.

        `infos` is what a restart needs to write the record of a call that died with the process.
        """
        with self._main:
            self._main.execute("BEGIN")
            (after,) = self._main.execute(
                "UPDATE sessions SET next_seq = next_seq + ? WHERE session_id = ? RETURNING next_seq",
                (len(infos), session_id),
            ).fetchone()
            first = int(after) - len(infos)
            self._main.executemany(
                "INSERT INTO reserved VALUES (?, ?, ?)",
                [(session_id, first + index, info) for index, info in enumerate(infos)],
            )
        return first

    def unrecorded(self, session_id: str | None = None) -> list[tuple[str, int, bytes]]:
        """(session, seq, info) of numbers without a record, in order; of one session or of all."""
        return self._main.execute(
            "SELECT session_id, seq, info FROM reserved WHERE session_id = ifnull(?, session_id)"
            " ORDER BY session_id, seq",
            (session_id,),
        ).fetchall()

    def record(self, records: Sequence[CallRecord]) -> int:
        """Spool the records of reserved numbers; returns the id of the last."""
        record_id = 0
        encoded = [encode(record) for record in records]
        with self._main:
            self._main.execute("BEGIN")
            for record, data in zip(records, encoded, strict=True):
                record_id = self._append(record.session_id, data, borders=False)
                self._main.execute(
                    "DELETE FROM reserved WHERE session_id = ? AND seq = ?", (record.session_id, record.seq)
                )
            self._main.executemany(
                "UPDATE sessions SET sampled_tokens = sampled_tokens + ? WHERE session_id = ?",
                [(len(record.sampled_ids), record.session_id) for record in records],
            )
        self._count(encoded)
        return record_id

    def seal(self, event: SessionSealed) -> int:
        """Spool the seal and close the session for good; returns the record's id."""
        data = encode(event)
        with self._main:
            self._main.execute("BEGIN")
            record_id = self._append(event.session_id, data, borders=True)
            self._main.execute(
                "UPDATE sessions SET sealed_record = ? WHERE session_id = ?", (record_id, event.session_id)
            )
        self._count([data])
        return record_id

    def batch(self, after: int, *, max_records: int, max_bytes: int) -> list[SpooledRecord]:
        """The next records behind `after`: at least one if there is one, within the limits else."""
        rows = self._main.execute(
            "SELECT id, session_id, borders, event FROM records WHERE id > ? ORDER BY id LIMIT ?",
            (after, max_records),
        )
        taken: list[SpooledRecord] = []
        size = 0
        for record_id, session_id, borders, data in rows:
            size += len(data)
            if taken and size > max_bytes:
                break
            taken.append(SpooledRecord(record_id, session_id, bool(borders), data))
        return taken

    def acknowledge(self, records: Sequence[SpooledRecord]) -> None:
        """Drop records that the broker holds."""
        with self._main:
            self._main.execute("BEGIN")
            self._main.executemany("DELETE FROM records WHERE id = ?", [(record.id,) for record in records])
        self.num_records -= len(records)
        self.size_bytes -= sum(len(record.data) for record in records)

    def has_record(self, record_id: int) -> bool:
        """Whether a record still waits for its acknowledgement."""
        return self._main.execute("SELECT 1 FROM records WHERE id = ?", (record_id,)).fetchone() is not None

    def purge(self, now: float) -> int:
        """Forget sessions whose keys expired long ago; returns how many."""
        with self._main:
            self._main.execute("BEGIN")
            return self._main.execute(
                "DELETE FROM sessions WHERE expires_at < ?"
                " AND session_id NOT IN (SELECT session_id FROM reserved)",
                (now - FORGET_SECONDS,),
            ).rowcount

    def fsync(self) -> None:
        """Everything committed so far survives the end of the machine. Blocks; for a thread."""
        os.fsync(self._wal)

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the write-ahead log has grown enough."""
        return self._unchecked_bytes >= CHECKPOINT_BYTES

    def checkpoint(self) -> None:
        """Move the write-ahead log into the database. Blocks; for a thread."""
        self._unchecked_bytes = 0
        self._checkpointer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _append(self, session_id: str, data: bytes, *, borders: bool) -> int:
        cursor = self._main.execute(
            "INSERT INTO records (session_id, borders, event) VALUES (?, ?, ?)", (session_id, borders, data)
        )
        return int(cursor.lastrowid or 0)

    def _count(self, added: Sequence[bytes]) -> None:
        size = sum(map(len, added))
        self.num_records += len(added)
        self.size_bytes += size
        self._unchecked_bytes += size
