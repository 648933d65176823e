"""The stitcher: polar.calls.v1 → polar.trajectories.v1.

Consumes SessionOpened, CallRecord and the closing record of a session, all in one partition, and
emits its Trajectory once, when it closes. Time decides one thing only: a session that is idle
for too long, or one too many, is given up by a SessionAbandoned that is written first and
obeyed when it is read back, so a replay closes the session at the same record.

Bounds: open sessions (the oldest are given up at the limit, a hard limit of twice that refuses
new ones as dead letters), remembered closed sessions.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

from polar.core.batch_metrics import sampled_by_kind
from polar.core.metrics import Metrics
from polar.core.open_keys import OpenKeys
from polar.core.session_log import SessionLog
from polar.core.stage import DeadLettered, Emit, LogRecord, Output, Partition
from polar.core.tree_outline import causes_of
from schemas.calls import CallRecord, SessionAbandoned, SessionOpened, SessionSealed
from schemas.trajectories import UsabilityRules

_REMEMBERED_CLOSED = 4096
"""Closed sessions that are remembered, to tell a late call from a duplicate."""


class StitcherCore:
    """StageCore over polar.calls.v1."""

    def __init__(
        self,
        *,
        max_open_sessions: int = 20_000,
        idle_seconds: float = 3600.0,
        rules: UsabilityRules | None = None,
    ) -> None:
        """`idle_seconds`: a session without a record for so long is given up."""
        self._max_open = max_open_sessions
        self._idle_seconds = idle_seconds
        self._rules = rules
        self._keys = OpenKeys(2 * max_open_sessions)
        self._logs: dict[str, SessionLog] = {}
        self._touched: OrderedDict[str, float] = OrderedDict()
        """Open session → time of its last record, the longest idle first."""
        self._partition_of: dict[str, Partition] = {}
        self._given_up: set[str] = set()
        """Open sessions whose SessionAbandoned was written and not read back yet."""
        self._closed: OrderedDict[str, frozenset[int]] = OrderedDict()
        """Recently closed session → numbers of its calls."""
        self._counts = {
            "trajectories": 0,
            "duplicates": 0,
            "late_calls": 0,
            "closed_before_start": 0,
            "repeated_closings": 0,
            "given_up": 0,
            "refused_sessions": 0,
        }
        self._calls_by_cause: Counter[str] = Counter()
        self._sampled_by_kind: Counter[str] = Counter()
        self._untrainable: Counter[str] = Counter()

    def on_assigned(self, ends: Mapping[Partition, tuple[int, int]]) -> None:
        """Start reading these partitions."""
        self._keys.assigned(ends)

    def on_revoked(self, partitions: Iterable[Partition]) -> None:
        """Forget the sessions of these partitions."""
        for session_id in self._keys.revoked(partitions):
            self._forget(session_id)

    def on_record(self, record: LogRecord, now: float) -> list[Output]:
        """Take one record; a closing record yields the session's Trajectory."""
        event = record.event
        outputs: list[Output] = []
        if isinstance(event, SessionOpened):
            outputs = self._open(record, event, now)
        elif isinstance(event, CallRecord):
            outputs = self._add(record, event, now)
        elif isinstance(event, (SessionSealed, SessionAbandoned)):
            outputs = self._close(event)
        self._keys.seen(record)
        return outputs

    def on_caught_up(self, partition: Partition, now: float) -> list[Output]:
        """Nothing depends on the end of the catch-up zone alone."""
        del partition, now
        return []

    def on_tick(self, now: float) -> list[Output]:
        """Give up sessions that are idle for too long, or too many."""
        outputs: list[Output] = []
        surplus = len(self._logs) - len(self._given_up) - self._max_open
        for session_id, touched in self._touched.items():
            is_idle = now - touched >= self._idle_seconds
            if not is_idle and surplus <= 0:
                break
            if session_id in self._given_up or not self._keys.is_caught_up(self._partition_of[session_id]):
                continue
            surplus -= 1
            reason = f"no record for {now - touched:.0f} s" if is_idle else "too many open sessions"
            self._given_up.add(session_id)
            self._counts["given_up"] += 1
            group_id = self._logs[session_id].opened.group_id
            outputs.append(Emit(SessionAbandoned(session_id=session_id, group_id=group_id, reason=reason)))
        return outputs

    def commit_offsets(self) -> Mapping[Partition, int]:
        """Never above the SessionOpened of an open session."""
        return self._keys.commit_offsets()

    def metrics(self) -> Metrics:
        """Open sessions, records held for them, and counters since the start: among them the calls
        that split off from an earlier one, sampled tokens, and calls that must not be trained."""
        held = sum(len(log.records) for log in self._logs.values())
        return {
            "open_sessions": len(self._logs),
            "held_calls": held,
            **self._counts,
            "calls_by_cause_total": dict(self._calls_by_cause),
            "sampled_tokens_by_kind_total": dict(self._sampled_by_kind),
            "untrainable_calls_by_reason_total": dict(self._untrainable),
        }

    def _open(self, record: LogRecord, event: SessionOpened, now: float) -> list[Output]:
        session_id = event.session_id
        if session_id in self._logs or session_id in self._closed:
            self._counts["duplicates"] += 1
            return []
        if self._keys.is_full:
            self._counts["refused_sessions"] += 1
            return [DeadLettered(record, "too_many_open_sessions", f"{len(self._logs)} are open")]
        self._keys.open(session_id, record)
        self._logs[session_id] = SessionLog(event)
        self._partition_of[session_id] = record.partition
        self._touch(session_id, now)
        return []

    def _add(self, record: LogRecord, event: CallRecord, now: float) -> list[Output]:
        log = self._logs.get(event.session_id)
        if log is not None:
            self._touch(event.session_id, now)
            if not log.add(event):
                self._counts["duplicates"] += 1
            return []
        closed = self._closed.get(event.session_id)
        if closed is not None and event.seq in closed:
            self._counts["duplicates"] += 1
            return []
        if closed is None and self._keys.in_catch_up_zone(record):
            self._counts["closed_before_start"] += 1
            return []
        self._counts["late_calls"] += 1
        return [DeadLettered(record, "late_call", f"session {event.session_id} is closed")]

    def _close(self, event: SessionSealed | SessionAbandoned) -> list[Output]:
        session_id = event.session_id
        log = self._logs.get(session_id)
        if log is None:
            self._counts["repeated_closings"] += 1
            return []
        trajectory = log.close(event, self._rules)
        self._closed[session_id] = frozenset(log.records)
        while len(self._closed) > _REMEMBERED_CLOSED:
            self._closed.popitem(last=False)
        self._keys.close(session_id)
        self._forget(session_id)
        self._counts["trajectories"] += 1
        self._calls_by_cause += causes_of(trajectory.calls)
        self._sampled_by_kind += sampled_by_kind(trajectory.calls)
        self._untrainable.update(call.untrainable for call in trajectory.calls if call.untrainable)
        return [Emit(trajectory)]

    def _touch(self, session_id: str, now: float) -> None:
        self._touched[session_id] = now
        self._touched.move_to_end(session_id)

    def _forget(self, session_id: str) -> None:
        del self._logs[session_id], self._touched[session_id], self._partition_of[session_id]
        self._given_up.discard(session_id)
