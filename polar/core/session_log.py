"""The records of a session that is still open.

Invariant: a log restored from a snapshot closes to the same bytes as the one it was taken of.
"""

from polar.core.drift import Decode
from polar.core.stitching import stitch
from schemas.base import WireModel
from schemas.calls import CallRecord, SessionAbandoned, SessionOpened, SessionSealed
from schemas.trajectories import Trajectory, UsabilityRules


class SessionSnapshot(WireModel):
    """All that an open session has taken so far."""

    opened: SessionOpened
    records: tuple[CallRecord, ...]
    """In order of number."""


class SessionLog:
    """Takes the records of one session; duplicates by call number are dropped, the first wins."""

    def __init__(self, opened: SessionOpened) -> None:
        self.opened = opened
        self.records: dict[int, CallRecord] = {}

    @classmethod
    def restore(cls, snapshot: SessionSnapshot) -> "SessionLog":
        """The log that the snapshot was taken of."""
        log = cls(snapshot.opened)
        log.records = {record.seq: record for record in snapshot.records}
        return log

    def snapshot(self) -> SessionSnapshot:
        """The state as a value, at any point."""
        records = sorted(self.records.values(), key=lambda record: record.seq)
        return SessionSnapshot(opened=self.opened, records=tuple(records))

    def add(self, record: CallRecord) -> bool:
        """Take a record; False when its number is there already."""
        if record.seq in self.records:
            return False
        self.records[record.seq] = record
        return True

    def close(
        self,
        closing: SessionSealed | SessionAbandoned,
        rules: UsabilityRules | None = None,
        decode: Decode | None = None,
    ) -> Trajectory:
        """The trajectory of the session as it stands at its closing record."""
        return stitch(self.opened, self.records.values(), closing, rules, decode)
