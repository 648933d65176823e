"""From the spool to the log: one task, in spool order.

| waits for | who unblocks it |
|---|---|
| a record in the spool | `wake`, called after every commit |
| the broker | LogWriter's own time-out, then again after a pause, for ever |

Invariant: a record leaves the spool only after the broker acknowledged it. A session's opening
record is acknowledged before its calls are sent, and its calls before its seal. What was sent
before a crash and not yet dropped is sent again: consumers know duplicates by their ids.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from polar.core.stage import Partition
from polar.errors import LogError, LogUnavailableError, RecordTooLargeError
from polar.gateway.spool import Spool, SpooledRecord
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


Arrival = Literal["on_log", "late"]
"""What became of a record within the grace of who waits for it."""
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
        self._syncing: asyncio.Task[None] | None = None
        self._next_sync: asyncio.Task[None] | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._writer: Writer | None = None
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
            await self._arrival(record_id)

    async def durable(self, record_id: int, grace_seconds: float) -> None:
        """Wait until a record outlives this machine: on the log, or after the grace fsynced here.

        Raises OSError when the disk refuses.
        """
        if not self._spool.has_record(record_id):
            return
        arrival = self._arrival(record_id)
        # A tenth of what asyncio's ways to wait for some time cost each call.
        timer = asyncio.get_running_loop().call_later(grace_seconds, _resolve, arrival, "late")
        try:
            how = await arrival
        finally:
            timer.cancel()
        if how == "late":
            await self._synced()

    async def drained(self) -> None:
        """Wait until the spool is empty."""
        while rows := self._spool.batch(0, max_records=1, max_bytes=0):
            await self.acknowledged(rows[0].id)

    async def _send_next(self, writer: Writer) -> None:
        self._work.clear()
        batch = _until_border(
            self._spool.batch(self._sent, max_records=MAX_BATCH_RECORDS, max_bytes=MAX_BATCH_BYTES)
        )
        if not batch:
            await self._work.wait()
            return
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

    async def _synced(self) -> None:
        """One fsync at a time; all who come while one runs share the next."""
        if self._next_sync is None:
            self._next_sync = asyncio.create_task(self._sync_after(self._syncing))
        await asyncio.shield(self._next_sync)

    async def _sync_after(self, running: asyncio.Task[None] | None) -> None:
        if running is not None:
            await asyncio.wait({running})
        self._syncing, self._next_sync = self._next_sync, None
        await asyncio.to_thread(self._spool.fsync)


def _resolve(arrival: asyncio.Future[Arrival], how: Arrival) -> None:
    if not arrival.done():
        arrival.set_result(how)


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
