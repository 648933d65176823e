"""Drives one stage core: records in, outputs out, offsets committed. No FastStream in here.

    fetched batch ─▶ decode ─▶ core.on_record ─▶ publish in order ─▶ (each tick) commit
                       │                             │
                       └── unreadable ──▶ polar.dead-letters.v1 ◀┘ refused by the core

Invariants: the core is entered by one task at a time; outputs are acknowledged before the
offsets that made them are committed; a failure that is not a record's own stops everything at
once, so that a restart reads all above the committed offsets again.

| queue | bound | at the bound |
|---|---|---|
| records fetched | `MAX_BATCH_RECORDS` | the next batch is fetched when this one is published |
| outputs | those of one batch | the writer's own bound on unacknowledged bytes |
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata

from polar.core.metrics import Metrics
from polar.core.open_keys import TooManyOpenKeysError
from polar.core.stage import DeadLettered, Output, Partition, StageCore
from polar.errors import LogUnavailableError, PolarError, SettingsError
from polar.kafka.clients import from_kafka, partition_count, to_kafka
from polar.kafka.outages import through_outages
from polar.kafka.outputs import OutputPublisher
from polar.kafka.reader import SPECS, offset_ranges
from polar.kafka.records import RawRecord, decode_record, raw_record
from polar.kafka.tail import CATCH_UP_WAIT_MS, GapGuard, HoleWatch, set_fetch_wait
from polar.kafka.writer import LogWriter
from polar.settings import LogSettings
from schemas.codec import UnreadableRecordError
from schemas.topics import TopicSpec

logger = logging.getLogger(__name__)

MAX_BATCH_RECORDS = 500
STUCK_SECONDS = 120.0
"""A consumer that neither fetched nor committed for so long, with a broker that answers, is stuck."""
_BEHIND_RECORDS = 10
"""A batch of so many means that more are waiting."""
_GAP_SECONDS = 0.1
_COMMIT_SECONDS = 10.0
_NOTICE_SECONDS = 30.0


class StageFailedError(PolarError):
    """The stage cannot go on in this process; the message says why."""


class Stage:
    """One core and its place on the log. Everything below `_lock` is entered by one task at a time."""

    def __init__(
        self,
        settings: LogSettings,
        core: StageCore,
        topics: Sequence[TopicSpec],
        *,
        name: str,
        start_at_beginning: Sequence[TopicSpec] = (),
        tick_seconds: float = 1.0,
        in_thread: bool = False,
    ) -> None:
        """`in_thread`: for a core that may work for seconds. The event loop goes on meanwhile, so that the
        consumer group hears from its member."""
        self.settings = settings
        self.core = core
        self.counts: Counter[str] = Counter()
        """records, unreadable, refused, outputs, too_large, stale_records, lost_history, failed_commits"""
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self.writer = LogWriter(settings)
        self._publisher = OutputPublisher(self.writer, name, self.counts)
        self._topics = topics
        self._from_beginning = {topic.suffix for topic in start_at_beginning}
        self._tick_seconds = tick_seconds
        self._in_thread = in_thread
        self._shown: Metrics | None = None
        """The core's metrics while it works in a thread."""
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._consumer: Any = None
        self._next: dict[Partition, int] = {}
        self._catching_up: dict[Partition, int] = {}
        """Partition → end offset at assignment, until it is reached."""
        self._committed: dict[Partition, int] = {}
        self._gaps = GapGuard()
        self._holes = HoleWatch()
        self._seen_at_last_tick = 0
        self._last_sign_of_life = time.monotonic()
        self._suspect_since: float | None = None

    def lag(self) -> dict[Partition, int]:
        """Records of each assigned partition that are not processed yet, as last fetched."""
        lags = {}
        for partition, following in self._next.items():
            end = self._consumer.highwater(to_kafka(self.settings, partition)) if self._consumer else None
            lags[partition] = max(0, (end or 0) - following)
        return lags

    def metrics(self) -> Metrics:
        """Counters of the shell, gauges of the core, lag: see polar.core.metrics."""
        try:
            lag = sum(self.lag().values())
        except (AssertionError, IllegalStateError):  # in the middle of a rebalance
            lag = 0
        return {
            **{name: float(value) for name, value in self.counts.items()},
            **(self.core.metrics() if self._shown is None else self._shown),
            "lag_records": float(lag),
            "catching_up_partitions": float(len(self._catching_up)),
            "holes": float(self._gaps.holes),
            "unacknowledged_bytes": float(self.writer.unacknowledged_bytes),
        }

    # -- assignment ---------------------------------------------------------------------

    async def assigned(self, consumer: Any, partitions: Iterable[TopicPartition]) -> None:
        """Seek every partition to its committed offset, else to its beginning, and tell the core."""
        tps = list(partitions)
        # Before anything else runs: no fetch, and no complaint about a missing position, until
        # the right one is known.
        for tp in tps:
            consumer.seek(tp, 0)
        consumer.pause(*tps)
        async with self._lock:
            self._consumer = consumer
            mine = {from_kafka(self.settings, tp): tp for tp in tps}
            self._check_pairs(mine)
            ends: dict[Partition, tuple[int, int]] = {}
            for partition, (first, end) in (await self._ranges(list(mine))).items():
                start = await self._start_of(partition, mine[partition], first, end)
                consumer.seek(mine[partition], start)
                self._next[partition] = start
                self._catching_up[partition] = end
                ends[partition] = (start, end)
            self.core.on_assigned(ends)
            consumer.resume(*tps)
        self._wake.set()

    async def revoked(self, partitions: Iterable[TopicPartition]) -> None:
        """Commit what is done, then forget the partitions."""
        gone = [from_kafka(self.settings, tp) for tp in partitions]
        async with self._lock:
            await self._commit()
            self._gaps.forget(gone)
            for partition in gone:
                for table in (self._next, self._catching_up, self._committed):
                    table.pop(partition, None)
            if gone:
                self.core.on_revoked(gone)

    async def _ranges(self, partitions: Sequence[Partition]) -> dict[Partition, tuple[int, int]]:
        return await through_outages(lambda: offset_ranges(self.settings, partitions))

    async def _start_of(self, partition: Partition, tp: TopicPartition, first: int, end: int) -> int:
        if partition.topic in self._from_beginning:
            return first
        committed = await self._consumer.committed(tp)
        # A negative offset is a client's placeholder for none.
        if committed is None or committed < 0:
            return first
        if first <= committed <= end:
            self._committed[partition] = committed
            return int(committed)
        self.counts["lost_history"] += 1
        logger.error(
            "%s/%d: the committed offset %d is outside %d..%d, records were deleted before they were "
            "processed; reading from %d",
            partition.topic, partition.number, committed, first, end, first,
        )  # fmt: skip
        return first

    def _check_pairs(self, mine: Iterable[Partition]) -> None:
        """Topics keyed by group must bring equal partition numbers to the same member."""
        numbers: dict[str, set[int]] = {
            topic.suffix: set() for topic in self._topics if topic.partitions == "groups"
        }
        for partition in mine:
            if partition.topic in numbers:
                numbers[partition.topic].add(partition.number)
        if len({frozenset(owned) for owned in numbers.values()}) > 1:
            counts = {topic.suffix: partition_count(self.settings, topic) for topic in self._topics}
            self.fail(
                SettingsError(
                    f"equal partitions did not come together ({numbers}); give these topics the same number "
                    f"of partitions (configured: {counts}) and every member the range assignor"
                )
            )

    # -- records ------------------------------------------------------------------------

    async def process(self, records: Sequence[Any]) -> None:
        """Process one fetched batch (aiokafka's ConsumerRecords). Never raises: see `failure`."""
        try:
            async with self._lock:
                if self.failed.is_set():
                    return
                raws: dict[tuple[Partition, int], RawRecord] = {}
                outputs: list[Output] = []
                for raw in await self._fresh(records):
                    raws[raw.partition, raw.offset] = raw
                    outputs += await self._one(raw)
                    # Heartbeats, and what else runs beside the core, get their turn.
                    await asyncio.sleep(0)
                outputs += await self._caught_up()
                await self._publisher.publish(outputs, raws)
                self._last_sign_of_life = time.monotonic()
            if self._gaps.is_waiting:
                await asyncio.sleep(_GAP_SECONDS)
        except Exception as error:  # noqa: BLE001 - the one capture point: nothing may be skipped
            self.fail(error)

    async def _fresh(self, records: Sequence[Any]) -> list[RawRecord]:
        """Records of this assignment, up to a gap that may still fill; the others come again."""
        if self._consumer is not None:
            is_behind = len(records) >= _BEHIND_RECORDS
            set_fetch_wait(self._consumer, CATCH_UP_WAIT_MS if is_behind else self.settings.fetch_max_wait_ms)
        by_partition: dict[TopicPartition, list[Any]] = {}
        for record in records:
            by_partition.setdefault(TopicPartition(record.topic, record.partition), []).append(record)
        self._holes.records_came()
        fresh: list[RawRecord] = []
        for tp, items in by_partition.items():
            partition = from_kafka(self.settings, tp)
            if partition not in self._next or await self._was_moved(tp, items[-1].offset):
                self.counts["stale_records"] += len(items)
                continue
            following = self._next[partition]
            new = [item for item in items if item.offset >= following]
            ready, again = self._gaps.ready(partition, following, new, time.time())
            if again is not None:
                self._consumer.seek(tp, again)
            fresh += [raw_record(partition, item) for item in ready]
        return fresh

    async def _was_moved(self, tp: TopicPartition, last_offset: int) -> bool:
        """Whether the consumer was sought elsewhere after these records were fetched."""
        try:
            return bool(await self._consumer.position(tp) <= last_offset)
        except IllegalStateError:
            return True

    async def _one(self, raw: RawRecord) -> list[Output]:
        self._next[raw.partition] = raw.offset + 1
        self.counts["records"] += 1
        try:
            record = decode_record(raw, SPECS[raw.partition.topic])
        except UnreadableRecordError as error:
            self.counts["unreadable"] += 1
            await self._publisher.refuse(raw, error.reason, error.detail)
            return []
        try:
            return await self._work(self.core.on_record, record, time.time())
        except TooManyOpenKeysError:
            raise
        except Exception as error:  # one bad record must not stop the others
            logger.exception("%s/%d@%d", record.partition.topic, record.partition.number, record.offset)
            return [DeadLettered(record, "stage_error", f"{type(error).__name__}: {error}")]

    async def _caught_up(self) -> list[Output]:
        outputs: list[Output] = []
        reached = {p for p, end in self._catching_up.items() if self._next[p] >= end}
        for partition in sorted(reached):
            del self._catching_up[partition]
            outputs += await self._work(self.core.on_caught_up, partition, time.time())
        return outputs

    async def _work(self, step: Callable[..., list[Output]], *arguments: Any) -> list[Output]:
        """What a step of the core returns. The core is never left working: a cancellation waits for it."""
        if not self._in_thread:
            return step(*arguments)
        self._shown = dict(self.core.metrics())
        working = asyncio.ensure_future(asyncio.to_thread(step, *arguments))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait({working})
            working.exception()  # the one that ends the stage is the cancellation
            raise
        finally:
            self._shown = None

    # -- time ---------------------------------------------------------------------------

    async def tick_for_ever(self) -> None:
        """Tell the core the time, publish what it decides, commit. Returns when the stage failed."""
        while not self.failed.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._tick_seconds)
            self._wake.clear()
            async with self._lock:
                if self.failed.is_set():
                    return
                self._notice_quiet()
                outputs = await self._caught_up()
                outputs += await self._work(self.core.on_tick, time.time())
                await self._publisher.publish(outputs, {})
                await self._commit()
            await self._check_life()

    def _notice_quiet(self) -> None:
        """Nothing came since the last tick: fetch with short waits, and find holes at the ends."""
        seen = self.counts["records"]
        if seen != self._seen_at_last_tick or self._consumer is None or self._gaps.is_waiting:
            self._seen_at_last_tick = seen
            return
        set_fetch_wait(self._consumer, self.settings.fetch_max_wait_ms)
        waiting = {to_kafka(self.settings, partition): partition for partition in self._catching_up}
        try:
            holes = self._holes.at_hole(self._consumer, waiting)
        except (AssertionError, IllegalStateError):  # not assigned any more
            return
        for tp in holes:
            self._catching_up[waiting[tp]] = self._next[waiting[tp]]

    async def leave(self) -> None:
        """Last commit before the consumer stops."""
        async with self._lock:
            if not self.failed.is_set():
                await self._commit()

    async def _commit(self) -> None:
        """Commit offsets that moved. A refused commit costs only reading again."""
        if self._consumer is None:
            return
        moved = {
            partition: offset
            for partition, offset in self.core.commit_offsets().items()
            if partition.topic not in self._from_beginning
            and partition in self._next
            and offset != self._committed.get(partition)
        }
        if not moved:
            return
        offsets = {to_kafka(self.settings, p): OffsetAndMetadata(offset, "") for p, offset in moved.items()}
        try:
            await asyncio.wait_for(self._consumer.commit(offsets), _COMMIT_SECONDS)
        except (KafkaError, TimeoutError) as error:
            self.counts["failed_commits"] += 1
            logger.warning("offsets were not committed: %r", error)
        else:
            self._committed |= moved
            self._last_sign_of_life = time.monotonic()

    async def _check_life(self) -> None:
        """aiokafka's consumer can hang after an outage: then this process must be replaced."""
        if self._consumer is None or not self._next:
            return
        try:
            polls = [self._consumer.last_poll_timestamp(to_kafka(self.settings, p)) for p in self._next]
        except (AssertionError, IllegalStateError):
            return
        silent = min(
            time.monotonic() - self._last_sign_of_life, time.time() - max(poll or 0 for poll in polls) / 1000
        )
        if silent < STUCK_SECONDS:
            return
        try:
            await offset_ranges(self.settings, list(self._next)[:1])
        except LogUnavailableError:
            return
        self.fail(
            StageFailedError(
                f"the consumer has fetched nothing for {silent:.0f} s although the broker answers"
            )
        )

    def fail(self, error: BaseException) -> None:
        """Stop: nothing is processed, published or committed after this."""
        if self.failure is None:
            logger.critical("stage stops: %r", error, exc_info=error)
            self.failure = error
            self.failed.set()
