"""From a finished call to a durable record: build, spool, wait.

Invariant: what `record` returns is spooled, so nothing that happens later loses it; what
`durable` returned for outlives the machine.
"""

import logging
from collections import Counter

from polar.core.continuity import Plan
from polar.core.dialects.engine_answer import Captured
from polar.core.recording import Dispatched, build_records
from polar.gateway.prompts import Prompts
from polar.gateway.sender import SpoolSender
from polar.gateway.sessions import LiveSession, SessionTable
from schemas.calls import Delivery
from schemas.policies import PolicyVersion

logger = logging.getLogger(__name__)


class Recorder:
    """Records the calls of all sessions."""

    def __init__(
        self,
        sessions: SessionTable,
        sender: SpoolSender,
        prompts: Prompts,
        grace_seconds: float,
        *,
        tries_disk: bool,
    ) -> None:
        """`tries_disk`: whether an answer may end on an fsync before the broker is late."""
        self._sessions = sessions
        self._prompts = prompts
        self._sender = sender
        self._grace_seconds = grace_seconds
        self._tries_disk = tries_disk
        self.counters: Counter[str] = Counter()
        """Records by delivery and by reason why they are not trained."""

    def record(
        self,
        live: LiveSession,
        call: Dispatched,
        planned: Plan,
        captured: Captured,
        *,
        last_version: PolicyVersion,
        delivery: Delivery,
        error: str,
    ) -> int:
        """Spool a call's records; returns the spool id of the last. Raises OSError."""
        records = build_records(
            call, captured, live.history, last_version=last_version, delivery=delivery, error=error
        )
        rows = self._prompts.remember(live, planned, captured, records)
        record_id = self._sessions.commit(live, records, rows)
        self._sender.wake()
        for record in records:
            self.counters[record.delivery] += 1
            if record.untrainable is not None:
                self.counters[record.untrainable] += 1
            logger.debug(
                "session_id=%s seq=%s policy_version=%s..%s %s finish=%s %s",
                live.session_id, record.seq, call.first_version, last_version, record.delivery,
                record.finish_reason, record.error,
            )  # fmt: skip
        return record_id

    async def durable(self, record_id: int) -> None:
        """Wait until a call's record outlives the machine, as an answer does. Raises OSError."""
        await self._sender.durable(record_id, self._grace_seconds, tries_disk=self._tries_disk)

    async def on_log(self, record_id: int) -> None:
        """Wait for the broker, and after the grace for the disk. Raises OSError."""
        await self._sender.durable(record_id, self._grace_seconds, tries_disk=False)
