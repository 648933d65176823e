"""The sessions of a gateway: which are open, what number comes next, what is in flight.

The spool holds what must survive; memory holds calls in flight and delta histories, the latter
bounded in bytes (longest idle first) and rebuilt as whole records after a loss.

Invariant: a number is reserved in the spool before its call is dispatched, and leaves it only
with its record; a sealed session has as many records as its seal says.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar.core.continuity_table import ContinuityTable
from polar.core.dialects.base import ModelRequest
from polar.core.recording import Dispatched, RecordedCall, recorded, unfinished_record
from polar.core.session_budget import Used
from polar.core.session_history import EncodedMessages, EncodedTools, SessionHistory
from polar.core.session_keys import SessionClaims
from polar.core.token_text import TokenText
from polar.gateway.continuity_rows import ContinuityRows
from polar.gateway.spool import SessionRow, Spool
from schemas.calls import Continuity, SessionOpened, SessionSealed
from schemas.ids import group_of
from schemas.policies import PolicyVersion
from schemas.sessions import Outcome
from schemas.tasks import SamplingSpec

logger = logging.getLogger(__name__)

_MAX_LIVE = 4096
"""Sessions in memory, besides those with calls in flight."""


class SessionRefusedError(Exception):
    """The session takes no calls; `reason` is `not_open` or `sealed`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class InFlight:
    """A call between dispatch and record."""

    task: asyncio.Task[Any]
    """Carries it out."""
    choices: int
    """Number of its seqs."""
    ended: asyncio.Future[None] | None = None
    """For a seal that waits for it."""


@dataclass(slots=True)
class LiveSession:
    """What memory holds of a session."""

    session_id: str
    group_id: str
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    """By first seq."""
    sealing: bool = False
    engine_id: str | None = None
    """Engine of its last call: its prefixes are cached there."""
    history: SessionHistory = field(default_factory=SessionHistory)
    continuity: ContinuityTable = field(default_factory=ContinuityTable)
    history_bytes: int = 0
    """Size of both as the table counts it."""

    @property
    def open_calls(self) -> tuple[int, ...]:
        """seqs in flight, in order."""
        if not self.in_flight:
            return ()
        return tuple(
            sorted(first + index for first, call in self.in_flight.items() for index in range(call.choices))
        )


class SessionTable:
    """All sessions of one gateway."""

    def __init__(self, spool: Spool, rows: ContinuityRows, gateway_id: str, history_max_bytes: int) -> None:
        self._spool = spool
        self._rows = rows
        self._gateway_id = gateway_id
        self._history_max_bytes = history_max_bytes
        self.history_bytes = 0
        """Held in memory, to encode against and to continue."""
        self._live: OrderedDict[str, LiveSession] = OrderedDict()
        self.num_in_flight = 0
        """Calls between dispatch and record."""
        self.num_lost_ids = 0
        """Calls whose ids did not come back after a restart: what continues them is rendered in full."""

    def open(
        self, session_id: str, group_id: str, sampling: SamplingSpec, expires_at: float, *, trainable: bool
    ) -> int:
        """Open a session, or find it open; returns the spool id of its SessionOpened.

        Raises SessionRefusedError when it is sealed.
        """
        row = self._spool.session(session_id)
        if row is not None:
            if row.sealed_record is not None:
                raise SessionRefusedError("sealed", f"session {session_id} is sealed")
            return row.opened_record
        event = SessionOpened(
            session_id=session_id,
            group_id=group_id,
            gateway_id=self._gateway_id,
            sampling=sampling,
            trainable=trainable,
        )
        logger.info("session_id=%s is open", session_id)
        return self._spool.open_session(event, expires_at)

    def admit(self, claims: SessionClaims) -> LiveSession:
        """The session of a valid key, if it takes calls. Raises SessionRefusedError."""
        row = self._spool.session(claims.session_id)
        if row is None:
            raise SessionRefusedError(
                "not_open",
                f"session {claims.session_id} is not open at this gateway; its node opens it first",
            )
        live = self._live.get(claims.session_id)
        if row.sealed_record is not None or (live is not None and live.sealing):
            raise SessionRefusedError(
                "sealed", f"session {claims.session_id} is sealed and takes no more calls"
            )
        return self._touch(row)

    def used(self, session_id: str) -> Used:
        """What a session that is open has used up."""
        row = self._require(session_id)
        return Used(row.next_seq - 1, row.sampled_tokens)

    def begin(
        self,
        live: LiveSession,
        request: ModelRequest,
        task: asyncio.Task[Any] | None,
        *,
        trainable: bool,
        sampling_used: dict[str, Any],
        engine_id: str,
        logprobs_mode: str,
        first_version: PolicyVersion,
        messages: EncodedMessages,
        tools: EncodedTools,
        continuity: Continuity | None = None,
        prompt: TokenText | None = None,
    ) -> Dispatched:
        """Reserve the numbers of a call that `task` carries out, and note it in flight."""
        if task is None:
            raise RuntimeError("a call runs in a task of its own, so that a seal can end it")
        open_calls = live.open_calls
        infos = [
            orjson.dumps(
                {
                    "group_id": live.group_id,
                    "request_digest": request.digest,
                    "choice_index": index,
                    "stream": request.stream,
                    "sampling_used": sampling_used,
                    "engine_id": engine_id,
                    "version": str(first_version),
                }
            )
            for index in range(request.choices)
        ]
        first_seq = self._spool.reserve(live.session_id, infos)
        live.in_flight[first_seq] = InFlight(task, request.choices)
        live.engine_id = engine_id
        self.num_in_flight += 1
        return Dispatched(
            session_id=live.session_id,
            group_id=live.group_id,
            first_seq=first_seq,
            open_calls=open_calls,
            request=request,
            messages=messages,
            tools=tools,
            sampling_used=sampling_used,
            trainable=trainable,
            engine_id=engine_id,
            logprobs_mode=logprobs_mode,
            first_version=first_version,
            continuity=continuity,
            prompt=prompt,
        )

    def commit(self, live: LiveSession, records: Sequence[RecordedCall], rows: Sequence[bytes] = ()) -> int:
        """Spool a call's records; returns the id of the last. The history has grown: trim it.

        `rows`: what a restart needs to continue these calls.
        """
        record_id = self._spool.record(live.session_id, records)
        self._rows.append(live.session_id, rows)
        size = live.history.size_bytes + live.continuity.size_bytes
        self.history_bytes += size - live.history_bytes
        live.history_bytes = size
        self._trim()
        return record_id

    def end(self, live: LiveSession, call: Dispatched) -> None:
        """The call is no longer in flight."""
        ended = live.in_flight.pop(call.first_seq, None)
        if ended is not None:
            self.num_in_flight -= 1
            if ended.ended is not None:
                ended.ended.set_result(None)

    async def seal(
        self, session_id: str, outcome: Outcome, reason: str, *, wait_seconds: float, now: float
    ) -> tuple[int, int]:
        """Refuse new calls, settle those in flight, spool the seal: (calls, spool id of the seal).

        Sealing again gives the same. A session that was never opened is opened first.
        Raises ValueError for an id that is none.
        """
        row = self._spool.session(session_id)
        if row is None:
            self.open(session_id, group_of(session_id), SamplingSpec(), now, trainable=True)
            row = self._require(session_id)
        if row.sealed_record is None:
            live = self._touch(row)
            live.sealing = True
            await self._settle(live, wait_seconds)
            row = self._require(session_id)
            if row.sealed_record is None:
                self._seal(row, outcome, reason)
                row = self._require(session_id)
            self._drop(session_id)
        return row.next_seq - 1, row.sealed_record or 0

    def recover(self, error: str, session_id: str | None = None) -> int:
        """Write the records of calls that died without one; returns how many."""
        unrecorded = self._spool.unrecorded(session_id)
        for session, seq, info in unrecorded:
            known = orjson.loads(info)
            record = unfinished_record(
                session,
                known["group_id"],
                seq,
                request_digest=known["request_digest"],
                choice_index=known["choice_index"],
                stream=known["stream"],
                sampling_used=known["sampling_used"],
                engine_id=known["engine_id"],
                version=PolicyVersion.parse(known["version"]),
                error=error,
            )
            self._spool.record(session, [recorded(record)])
            logger.warning("session_id=%s call %s has no answer: %s", session, seq, error)
        return len(unrecorded)

    def purge(self, now: float) -> int:
        """Forget sessions whose keys expired long ago; returns how many."""
        forgotten = self._spool.purge(now)
        self._rows.sweep(self._spool.open_sessions())
        return forgotten

    def _seal(self, row: SessionRow, outcome: Outcome, reason: str) -> None:
        self.recover("the gateway could not record this call", row.session_id)
        event = SessionSealed(
            session_id=row.session_id,
            group_id=row.group_id,
            calls=row.next_seq - 1,
            outcome=outcome,
            reason=reason,
        )
        self._spool.seal(event)
        self._rows.drop(row.session_id)
        logger.info("session_id=%s is sealed with %s calls, outcome %s", row.session_id, event.calls, outcome)

    async def _settle(self, live: LiveSession, wait_seconds: float) -> None:
        ending = {}
        for call in live.in_flight.values():
            call.ended = call.ended or asyncio.get_running_loop().create_future()
            ending[call.ended] = call.task
        if ending:
            _, late = await asyncio.wait(ending, timeout=wait_seconds)
            for future in late:
                ending[future].cancel("the session is sealed")
            if late:
                await asyncio.wait(late)

    def _touch(self, row: SessionRow) -> LiveSession:
        live = self._live.get(row.session_id)
        if live is None:
            live = self._live[row.session_id] = LiveSession(row.session_id, row.group_id)
            if row.next_seq > 1:
                self.num_lost_ids += live.continuity.restore(self._rows.read(row.session_id))
                live.history_bytes = live.continuity.size_bytes
                self.history_bytes += live.history_bytes
        self._live.move_to_end(row.session_id)
        return live

    def _require(self, session_id: str) -> SessionRow:
        row = self._spool.session(session_id)
        if row is None:
            raise KeyError(session_id)
        return row

    def _drop(self, session_id: str) -> None:
        live = self._live.pop(session_id, None)
        if live is not None:
            self.history_bytes -= live.history_bytes

    def _trim(self) -> None:
        """Let the longest idle sessions forget, until the rest fits."""
        if self.history_bytes <= self._history_max_bytes and len(self._live) <= _MAX_LIVE:
            return
        while self.history_bytes > self._history_max_bytes or len(self._live) > _MAX_LIVE:
            idle = (id_ for id_, live in self._live.items() if not live.in_flight and not live.sealing)
            session_id = next(idle, None)
            if session_id is None:
                return
            self._drop(session_id)
