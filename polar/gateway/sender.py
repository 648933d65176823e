"""From the spool to the log: one task, in spool order.

| waits for | who unblocks it |
|---|---|
| a record in the spool | `wake`, called after every commit |
| an fsync that an answer waits for | its end, or 2 ms |
| more records for the batch, while nobody waits for the broker | 10 ms, or somebody who does |
| the broker | LogWriter's own time-out, then again after a pause, for ever |

Invariant: a record leaves the spool only after the broker acknowledged it. A session's opening
record is acknowledged before its calls are sent, and its calls before its seal. What was sent
before a crash and not yet dropped is sent again: consumers know duplicates by their ids.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol, TypeVar

from polar.core.stage import Partition
from polar.errors import LogError, LogUnavailableError, RecordTooLargeError
from polar.gateway.spool import Spool, SpooledRecord
from polar.gateway.syncing import SharedSync
from schemas.base import Event
from schemas.topics import CALLS, TopicSpec

logger = logging.getLogger(__name__)

MAX_BATCH_RECORDS = 256
MAX_BATCH_BYTES = 16 * 1024 * 1024
_PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0)


class Writer(Protocol):
    """What the sender needs of polar.kafka.writer.LogWriter."""

    async def write(self, event: Event) -> tuple[Partition, int]:
        """Write one event; returns its coordinates once it is acknowledged."""

    async def write_many_raw(
        self, topic: TopicSpec, records: Sequence[tuple[bytes | None, bytes | None, Mapping[str, bytes]]]
    ) -> list[tuple[Partition, int]]:
        """Write (key, value, headers) in order; returns when all are acknowledged."""


_FEW_RECORDS = 8
"""While at most so many records are on their way an answer may have an fsync; with more it would cost
what is scarce then, and a batch of many costs little."""
_SYNC_SECONDS = 0.002
"""A disk that takes longer is not waited for: the broker may be the first then."""
_GATHER_SECONDS = 0.01
"""A batch costs several times what one more record in it does."""

Arrival = Literal["on_log", "on_disk", "late"]
"""What became of a record within the grace of who waits for it."""
Result = TypeVar("Result")
WriterFactory = Callable[[], AbstractAsyncContextManager[Writer]]


class SpoolSender:
    """Sends what is spooled and tells who waits for it."""

    def __init__(self, spool: Spool, new_writer: WriterFactory) -> None:
        self._spool = spool
        self._new_writer = new_writer
        self._work = asyncio.Event()
        self._sent = 0
        self._waiting: dict[int, list[asyncio.Future[Arrival]]] = {}
        """By record: who waits for it."""
        self._gathered: asyncio.Future[None] | None = None
        """Ends the wait for more records, while there is one."""
        self._syncs = SharedSync(spool.fsync)
        self._releasing: asyncio.Task[None] | None = None
        self._writer: Writer | None = None
        self.durable_by: Counter[str] = Counter()
        """By arrival: records that somebody waited for."""
        self.refused = 0
        """Records over the broker's limit: logged and left out, since nothing could send them."""
        self.trouble = "no broker has answered yet"
        """Why the broker cannot be reached; empty while it can."""

    def wake(self) -> None:
        """There is something new in the spool."""
        self._work.set()

    async def run(self) -> None:
        """Send for ever. One writer for all tries: it knows what an interrupted try has sent."""
        try:
            await self._run()
        finally:
            if self._releasing is not None:
                await asyncio.wait({self._releasing})
            await self._syncs.close()

    async def _run(self) -> None:
        failures = 0
        async with self._new_writer() as writer:
            self._writer = writer
            while True:
                try:
                    await self._send_next(writer)
                    failures = 0
                except (LogError, OSError) as error:
                    pause = _PAUSES[min(failures, len(_PAUSES) - 1)]
                    failures += 1
                    self.trouble = str(error)
                    logger.warning(
                        "%s records wait in the spool, next try in %s s: %s",
                        self._spool.num_records, pause, error,
                    )  # fmt: skip
                    await asyncio.sleep(pause)

    async def write_aside(self, event: Event) -> None:
        """Write an event that needs no spool. Raises LogError."""
        if self._writer is None:
            raise LogUnavailableError("the writer has not started")
        try:
            await self._writer.write(event)
        except LogError as error:
            self.trouble = str(error)
            raise
        self.trouble = ""

    async def acknowledged(self, record_id: int) -> None:
        """Wait until the broker holds this record."""
        if self._spool.has_record(record_id):
            arrival = self._arrival(record_id)
            self._hurry()
            await arrival

    async def durable(self, record_id: int, grace_seconds: float, *, tries_disk: bool) -> None:
        """Wait until a record outlives this machine's end: on the log, or fsynced here.

        `tries_disk`: whichever comes first, while few records are on their way; else the log, and after
        the grace the disk.
        Raises OSError when the disk refuses and the broker has not answered within the grace.
        """
        if not self._spool.has_record(record_id):
            return
        arrival = self._arrival(record_id)
        if tries_disk and self._spool.num_records <= _FEW_RECORDS:
            self._syncs.ask().add_done_callback(lambda synced: _resolve_by_disk(arrival, synced))
        else:
            self._hurry()
        # A tenth of what asyncio's ways to wait for some time cost each call.
        timer = asyncio.get_running_loop().call_later(grace_seconds, _resolve, arrival, "late")
        try:
            how = await arrival
        finally:
            timer.cancel()
        if how == "late":
            await self._syncs.ask()
        self.durable_by[how] += 1

    async def drained(self) -> None:
        """Wait until the spool is empty."""
        while rows := self._spool.batch(0, max_records=1, max_bytes=0):
            await self.acknowledged(rows[0].id)

    async def _send_next(self, writer: Writer) -> None:
        self._work.clear()
        if not self._spool.num_records:
            await self._work.wait()
            return
        # An answer waits for that; it would stand behind the work that a batch makes.
        await self._syncs.let_go_first(_SYNC_SECONDS)
        await self._gather()
        batch = _until_border(
            self._spool.batch(self._sent, max_records=MAX_BATCH_RECORDS, max_bytes=MAX_BATCH_BYTES)
        )
        try:
            await _write(writer, batch)
        except RecordTooLargeError:
            await self._send_singly(writer, batch)
        self.trouble = ""
        self._spool.acknowledge(batch[-1].id)
        self._sent = batch[-1].id
        for record in batch:
            for arrival in self._waiting.pop(record.id, ()):
                _resolve(arrival, "on_log")
        if self._spool.wants_release and self._releasing is None:
            self._releasing = asyncio.create_task(self._release(self._spool.first_needed))

    async def _gather(self) -> None:
        """Let more records come, as long as nobody waits for the broker to have one."""
        if any(not arrival.done() for arrivals in self._waiting.values() for arrival in arrivals):
            return
        loop = asyncio.get_running_loop()
        gathered: asyncio.Future[None] = loop.create_future()
        self._gathered = gathered
        timer = loop.call_later(_GATHER_SECONDS, _resolve, gathered, None)
        try:
            await gathered
        finally:
            timer.cancel()
            self._gathered = None

    def _hurry(self) -> None:
        """Somebody waits for the broker."""
        if self._gathered is not None:
            _resolve(self._gathered, None)

    async def _release(self, first: int) -> None:
        """Records do not wait for that: the disk may take a tenth of a second for a full segment."""
        try:
            await asyncio.to_thread(self._spool.release, first)
        except OSError as error:
            logger.warning("sent segments of the spool stay for now: %s", error)
        finally:
            self._releasing = None

    async def _send_singly(self, writer: Writer, batch: list[SpooledRecord]) -> None:
        for record in batch:
            try:
                await _write(writer, [record])
            except RecordTooLargeError:
                self.refused += 1
                logger.exception(
                    "record %s of session_id=%s is over the broker's limit and cannot be kept",
                    record.id, record.session_id,
                )  # fmt: skip

    def _arrival(self, record_id: int) -> asyncio.Future[Arrival]:
        """A future of its own for everybody who waits, so that it may be cancelled."""
        arrival: asyncio.Future[Arrival] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(record_id, []).append(arrival)
        return arrival


def _resolve(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _resolve_by_disk(arrival: asyncio.Future[Arrival], synced: asyncio.Future[None]) -> None:
    if not synced.cancelled() and synced.exception() is None:
        _resolve(arrival, "on_disk")


async def _write(writer: Writer, records: Sequence[SpooledRecord]) -> None:
    """The spooled bytes are the values on the log: nothing is decoded on the way."""
    await writer.write_many_raw(CALLS, [(record.session_id.encode(), record.data, {}) for record in records])


def _until_border(records: list[SpooledRecord]) -> list[SpooledRecord]:
    """The leading records that may be in flight together: one that opens or closes a session
    never shares a batch with another record of it."""
    seen: dict[str, bool] = {}
    for position, record in enumerate(records):
        before = seen.get(record.session_id)
        if before is not None and (before or record.borders):
            return records[:position]
        seen[record.session_id] = bool(before) or record.borders
    return records
