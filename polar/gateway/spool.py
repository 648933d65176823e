"""The durable spool of one gateway: sessions, calls without a record, records without an acknowledgement.

| state | holds | until |
|---|---|---|
| sessions | key opened, next seq, sealed | a day after the key expired |
| reserved | numbers given to calls that have no record yet | their record is spooled |
| waiting | events of polar.calls.v1, in the order they happened | the broker's acknowledgement |

The state is in memory; every change of it is a frame of the journal first, and a restart adds
the frames up again. Invariant: one frame takes a number out of `reserved` and puts its record
into `waiting`, so every number has exactly one record, whenever the process dies. What was
acknowledged just before a kill may be sent once more.
"""

import fcntl
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson

from polar.core.recording import RecordedCall
from polar.errors import SettingsError
from polar.gateway.journal import Blob, Journal
from schemas.base import encode, shrunk
from schemas.calls import SessionOpened, SessionSealed

logger = logging.getLogger(__name__)

FORGET_SECONDS = 24 * 3600
"""A session is remembered so long after its key expired: it may be sealed late, or twice."""
SEGMENT_BYTES = 64 * 1024 * 1024
"""At this size the journal goes on in a new segment, so that the old one can go."""
_MAX_CHANGED = 64
"""Sessions whose text is brought up to date when a segment begins; of others it is before that."""
_HELD_BYTES = 16 * 1024 * 1024
"""Waiting records up to so many bytes stay in memory; the rest is read again when its turn comes."""


@dataclass(slots=True)
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


_fields_of = attrgetter(*(field.name for field in fields(SessionRow)))


@dataclass(frozen=True, slots=True)
class SpooledRecord:
    """An event that the broker has not acknowledged."""

    id: int
    session_id: str
    borders: bool
    """It opens or closes its session: its neighbours of the same session wait for it."""
    data: bytes


@dataclass(slots=True)
class _Waiting:
    """A record's place; `data` while it is held in memory."""

    id: int
    session_id: str
    borders: bool
    blob: Blob
    data: bytes | None


class Spool:
    """See the module. All methods but `fsync` and `release` belong to the event loop's thread.

    Whatever changes something raises OSError when the disk refuses; then nothing has changed.
    """

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
        self._sessions: dict[str, SessionRow] = {}
        self._texts: dict[str, bytes] = {}
        """JSON of each session: a new segment begins with them all, and no call should wait for that."""
        self._changed: dict[str, None] = {}
        """Sessions that are not as their texts say, in the order in which they began not to be."""
        self._reserved: dict[str, dict[int, str]] = {}
        self._waiting: deque[_Waiting] = deque()
        self._next_id = 1
        self._acknowledged = 0
        """Spool id of the last record that the broker holds."""
        self._held_bytes = 0
        self.size_bytes = 0
        """Of all waiting records."""
        self.num_open = 0
        """Unsealed sessions."""
        self._journal = Journal(folder)
        for head, blobs in self._journal.frames():
            self._apply(head, blobs)
        self._journal.begin_segment(self._state())
        self.release(self.first_needed)

    def close(self) -> None:
        """Release the files; what is in them stays."""
        self._journal.append({"kind": "acknowledged", "acknowledged": self._acknowledged})
        self._journal.close()
        self._lock.close()

    @property
    def num_records(self) -> int:
        """Records that wait for the broker."""
        return len(self._waiting)

    def session(self, session_id: str) -> SessionRow | None:
        """What is known of a session."""
        return self._sessions.get(session_id)

    def open_sessions(self, limit: int | None = None) -> list[str]:
        """Ids of unsealed sessions, at most `limit` of them."""
        return sorted(row.session_id for row in self._sessions.values() if row.sealed_record is None)[:limit]

    def open_session(self, event: SessionOpened, expires_at: float) -> int:
        """Add a session and its opening record; returns the record's id."""
        row = [event.session_id, event.group_id, expires_at]
        return self._change({"kind": "open", "session": row}, [encode(event)])

    def reserve(self, session_id: str, infos: Sequence[bytes]) -> int:
        """Give the next numbers of an open session to calls; returns the first number.

        `infos` (JSON) is what a restart needs to write the record of a call that died with the process.
        """
        first = self._sessions[session_id].next_seq
        texts = [info.decode() for info in infos]
        self._change({"kind": "reserve", "session": session_id, "first": first, "infos": texts})
        return first

    def unrecorded(self, session_id: str | None = None) -> list[tuple[str, int, bytes]]:
        """(session, seq, info) of numbers without a record, in order; of one session or of all."""
        sessions = sorted(self._reserved) if session_id is None else [session_id]
        return [
            (session, seq, text.encode())
            for session in sessions
            for seq, text in sorted(self._reserved.get(session, {}).items())
        ]

    def record(self, session_id: str, calls: Sequence[RecordedCall]) -> int:
        """Spool the records of reserved numbers of a session; returns the id of the last."""
        head = {
            "kind": "record",
            "session": session_id,
            "seqs": [call.seq for call in calls],
            "sampled": sum(len(call.sampled) for call in calls),
        }
        return self._change(head, [call.data for call in calls])

    def seal(self, event: SessionSealed) -> int:
        """Spool the seal and close the session for good; returns the record's id."""
        return self._change({"kind": "seal", "session": event.session_id}, [encode(event)])

    def batch(self, after: int, *, max_records: int, max_bytes: int) -> list[SpooledRecord]:
        """The next records behind `after`: at least one if there is one, within the limits else."""
        taken: list[SpooledRecord] = []
        size = 0
        for waiting in self._waiting:
            if waiting.id <= after:
                continue
            size += waiting.blob.size
            if len(taken) == max_records or (taken and size > max_bytes):
                break
            data = self._journal.read(waiting.blob) if waiting.data is None else waiting.data
            taken.append(SpooledRecord(waiting.id, waiting.session_id, waiting.borders, data))
        return taken

    def acknowledge(self, last_id: int) -> None:
        """The broker holds all records up to this one: drop them.

        Nothing is written for that alone: the next frame says it.
        """
        self._acknowledged = max(self._acknowledged, last_id)
        while self._waiting and self._waiting[0].id <= last_id:
            waiting = self._waiting.popleft()
            self.size_bytes -= waiting.blob.size
            if waiting.data is not None:
                self._held_bytes -= waiting.blob.size

    def has_record(self, record_id: int) -> bool:
        """Whether a record still waits for its acknowledgement."""
        return self._acknowledged < record_id < self._next_id

    def purge(self, now: float) -> int:
        """Forget sessions whose keys expired long ago; returns how many.

        Nothing is written for that: a restart may remember them until the next purge.
        """
        forgotten = [
            row.session_id
            for row in self._sessions.values()
            if row.expires_at < now - FORGET_SECONDS and row.session_id not in self._reserved
        ]
        for session_id in forgotten:
            self.num_open -= self._sessions.pop(session_id).sealed_record is None
            self._texts.pop(session_id, None)
            self._changed.pop(session_id, None)
        return len(forgotten)

    def fsync(self) -> None:
        """Everything so far survives the end of the machine. Blocks; for a thread. Raises OSError."""
        self._journal.fsync()

    @property
    def wants_release(self) -> bool:
        """Whether segments stand there in which nothing waits."""
        return self._journal.oldest < self.first_needed

    def release(self, first: int) -> None:
        """Delete the segments before number `first`. Blocks; for a thread. Raises OSError."""
        self._journal.release(first)

    @property
    def first_needed(self) -> int:
        """Number of the oldest segment in which something waits, or of the one that is written to."""
        return self._waiting[0].blob.segment if self._waiting else self._journal.segment

    def _change(self, change: dict[str, Any], data: Sequence[bytes] = ()) -> int:
        """Write a change, then make it; returns the id of its last record."""
        if self._journal.segment_bytes >= SEGMENT_BYTES:
            self._journal.begin_segment(self._state())
        head = {**change, "id": self._next_id, "acknowledged": self._acknowledged}
        self._apply(head, self._journal.append(head, data), data)
        if len(self._changed) > _MAX_CHANGED:
            self._note_one()
        return self._next_id - 1

    def _note_one(self) -> None:
        """Bring a session's text up to date."""
        session_id = next(iter(self._changed))
        del self._changed[session_id]
        if (row := self._sessions.get(session_id)) is not None:
            self._texts[session_id] = shrunk(orjson.dumps(_fields_of(row)))

    def _apply(self, head: Mapping[str, Any], blobs: Sequence[Blob], data: Sequence[bytes] = ()) -> None:
        """Make a change that stands in the journal."""
        kind = head["kind"]
        if kind in ("reserve", "record", "seal"):
            self._changed[head["session"]] = None
        if kind == "state":
            self._restore(head)
        elif kind == "open":
            session_id, group_id, expires_at = head["session"]
            row = SessionRow(session_id, group_id, expires_at, 1, 0, head["id"], None)
            self._sessions[session_id] = row
            self._changed[session_id] = None
            self.num_open += 1
            self._wait(head, session_id, blobs, data, borders=True)
        elif kind == "reserve":
            reserved = self._reserved.setdefault(head["session"], {})
            for seq, info in enumerate(head["infos"], start=head["first"]):
                reserved[seq] = info
            self._sessions[head["session"]].next_seq = head["first"] + len(head["infos"])
        elif kind == "record":
            self._unreserve(head["session"], head["seqs"])
            if (session := self._sessions.get(head["session"])) is not None:
                session.sampled_tokens += head["sampled"]
            self._wait(head, head["session"], blobs, data, borders=False)
        elif kind == "seal":
            session = self._sessions[head["session"]]
            self.num_open -= session.sealed_record is None
            session.sealed_record = head["id"]
            self._wait(head, head["session"], blobs, data, borders=True)
        self.acknowledge(head["acknowledged"])

    def _unreserve(self, session_id: str, seqs: Sequence[int]) -> None:
        reserved = self._reserved.get(session_id, {})
        for seq in seqs:
            reserved.pop(seq, None)
        if not reserved:
            self._reserved.pop(session_id, None)

    def _wait(
        self, head: Mapping[str, Any], session_id: str, blobs: Sequence[Blob], data: Sequence[bytes],
        *, borders: bool,
    ) -> None:  # fmt: skip
        for index, blob in enumerate(blobs):
            is_held = bool(data) and self._held_bytes + blob.size <= _HELD_BYTES
            self._held_bytes += blob.size * is_held
            self.size_bytes += blob.size
            record_id = head["id"] + index
            held = data[index] if is_held else None
            self._waiting.append(_Waiting(record_id, session_id, borders, blob, held))
            self._next_id = record_id + 1

    def _state(self) -> dict[str, Any]:
        """Everything but the records that wait: those keep their segments."""
        while self._changed:
            self._note_one()
        return {
            "kind": "state",
            "sessions": orjson.Fragment(b"[%b]" % b",".join(self._texts.values())),
            "reserved": [
                [session_id, seq, info]
                for session_id, infos in self._reserved.items()
                for seq, info in infos.items()
            ],
            "next_id": self._next_id,
            "acknowledged": self._acknowledged,
        }

    def _restore(self, head: Mapping[str, Any]) -> None:
        self._sessions = {values[0]: SessionRow(*values) for values in head["sessions"]}
        self._texts, self._changed = {}, dict.fromkeys(self._sessions)
        self.num_open = sum(row.sealed_record is None for row in self._sessions.values())
        self._reserved = {}
        for session_id, seq, info in head["reserved"]:
            self._reserved.setdefault(session_id, {})[seq] = info
        self._next_id = head["next_id"]
