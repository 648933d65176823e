"""The shell of every stream stage: records in, one pure core, outputs out, offsets committed.

    FastStream batch ─▶ decode ─▶ core.on_record ─▶ publish in order ─▶ (each tick) commit
                          │                             │
                          └── unreadable ──▶ polar.dead-letters.v1 ◀┘ refused by the core

Invariants: the core is entered by one task at a time; outputs are acknowledged before the
offsets that made them are committed; a failure that is not a record's own ends the process, so
that a restart reads everything above the committed offsets again.

| queue | bound | at the bound |
|---|---|---|
| records fetched | 500 a batch | the next batch is fetched when this one is published |
| outputs | those of one batch | the writer's own bound on unacknowledged bytes |
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata
from faststream import AckPolicy, FastStream
from faststream.kafka import KafkaBroker
from faststream.kafka.message import FAKE_CONSUMER, KafkaMessage

from polar.core.open_keys import TooManyOpenKeysError
from polar.core.stage import DeadLettered, LogRecord, Output, Partition, StageCore
from polar.errors import LogUnavailableError, PolarError, SettingsError
from polar.kafka.clients import bootstrap_servers, from_kafka, partition_count, subscriber_options, to_kafka
from polar.kafka.first_offsets import commit_first_offsets
from polar.kafka.outputs import OutputPublisher
from polar.kafka.reader import offset_ranges
from polar.kafka.records import RawRecord, decode_record, raw_record
from polar.kafka.writer import LogWriter
from polar.settings import LogSettings
from schemas.codec import UnreadableRecordError
from schemas.topics import TOPICS, TopicSpec

logger = logging.getLogger(__name__)

MAX_BATCH_RECORDS = 500
_SPECS = {topic.suffix: topic for topic in TOPICS}

AlsoRun = Callable[[LogWriter], Awaitable[None]]


class StageFailedError(PolarError):
    """The stage cannot go on in this process; the message says why."""


class Stage:
    """Drives one core. Everything below `_lock` is entered by one task at a time."""

    def __init__(
        self,
        settings: LogSettings,
        core: StageCore,
        topics: Sequence[TopicSpec],
        *,
        name: str,
        start_at_beginning: Sequence[TopicSpec],
        tick_seconds: float,
    ) -> None:
        self.settings = settings
        self.core = core
        self.counts: Counter[str] = Counter()
        """records, unreadable, refused, outputs, stale_records since the start."""
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self.writer = LogWriter(settings)
        self._publisher = OutputPublisher(self.writer, name, self.counts)
        self._topics = topics
        self._from_beginning = {topic.suffix for topic in start_at_beginning}
        self._tick_seconds = tick_seconds
        self._lock = asyncio.Lock()
        self._consumer: Any = None
        self._starts: dict[Partition, int] = {}
        self._next: dict[Partition, int] = {}
        self._catching_up: dict[Partition, int] = {}
        """Partition → end offset at assignment, until it is reached."""
        self._committed: dict[Partition, int] = {}
        self._wake = asyncio.Event()

    def lag(self) -> dict[Partition, int]:
        """Records of each assigned partition that are not processed yet, as last fetched."""
        lags = {}
        for partition, following in self._next.items():
            end = self._consumer.highwater(to_kafka(self.settings, partition)) if self._consumer else None
            lags[partition] = max(0, (end or 0) - following)
        return lags

    # -- assignment ---------------------------------------------------------------------

    async def assigned(self, consumer: Any, partitions: Iterable[TopicPartition]) -> None:
        """Seek every partition to its committed offset, else to its beginning, and tell the core."""
        async with self._lock:
            self._consumer = consumer
            mine = {from_kafka(self.settings, tp): tp for tp in partitions}
            self._check_pairs(mine)
            ranges = await offset_ranges(self.settings, list(mine))
            ends: dict[Partition, tuple[int, int]] = {}
            for partition, tp in mine.items():
                first, end = ranges[partition]
                start = first
                if partition.topic not in self._from_beginning:
                    committed = await consumer.committed(tp)
                    if committed is not None and first <= committed <= end:
                        start = self._committed[partition] = committed
                    elif committed is not None:
                        logger.warning(
                            "%s/%d: committed offset %d is outside %d..%d, reading from %d",
                            partition.topic, partition.number, committed, first, end, first,
                        )  # fmt: skip
                consumer.seek(tp, start)
                self._starts[partition] = self._next[partition] = start
                self._catching_up[partition] = end
                ends[partition] = (start, end)
            self.core.on_assigned(ends)
        self._wake.set()

    async def revoked(self, partitions: Iterable[TopicPartition]) -> None:
        """Commit what is done, then forget the partitions."""
        gone = [from_kafka(self.settings, tp) for tp in partitions]
        async with self._lock:
            await self._commit()
            for partition in gone:
                for table in (self._starts, self._next, self._catching_up, self._committed):
                    table.pop(partition, None)
            self.core.on_revoked(gone)

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
            self._fail(
                SettingsError(
                    f"equal partitions did not come together ({numbers}); give these topics the same number "
                    f"of partitions (configured: {counts}) and every member the range assignor"
                )
            )

    # -- records ------------------------------------------------------------------------

    async def process(self, records: Sequence[Any]) -> None:
        """Process one fetched batch (aiokafka's ConsumerRecords)."""
        try:
            async with self._lock:
                raws: dict[tuple[Partition, int], RawRecord] = {}
                outputs: list[Output] = []
                for raw in await self._fresh(records):
                    raws[raw.partition, raw.offset] = raw
                    outputs += await self._one(raw)
                outputs += self._caught_up()
                await self._publisher.publish(outputs, raws)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the one capture point: nothing may be skipped
            self._fail(error)

    async def _fresh(self, records: Sequence[Any]) -> list[RawRecord]:
        """Records of this assignment: a batch fetched before a rebalance is read again."""
        by_partition: dict[TopicPartition, list[Any]] = {}
        for record in records:
            by_partition.setdefault(TopicPartition(record.topic, record.partition), []).append(record)
        fresh: list[RawRecord] = []
        for tp, items in by_partition.items():
            partition = from_kafka(self.settings, tp)
            if partition not in self._next or await self._was_moved(tp, items[-1].offset):
                self.counts["stale_records"] += len(items)
                continue
            fresh += [raw_record(partition, item) for item in items if item.offset >= self._next[partition]]
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
            record = decode_record(raw, _SPECS[raw.partition.topic])
        except UnreadableRecordError as error:
            self.counts["unreadable"] += 1
            await self._publisher.refuse(raw, error.reason, error.detail)
            return []
        return self._ask_core(record)

    def _ask_core(self, record: LogRecord) -> list[Output]:
        try:
            return self.core.on_record(record, time.time())
        except TooManyOpenKeysError:
            raise
        except Exception as error:  # one bad record must not stop the others
            logger.exception("%s/%d@%d", record.partition.topic, record.partition.number, record.offset)
            return [DeadLettered(record, "stage_error", f"{type(error).__name__}: {error}")]

    def _caught_up(self) -> list[Output]:
        outputs: list[Output] = []
        reached = [p for p, end in self._catching_up.items() if self._next[p] >= end]
        for partition in reached:
            del self._catching_up[partition]
            outputs += self.core.on_caught_up(partition, time.time())
        return outputs

    # -- time ---------------------------------------------------------------------------

    async def tick_for_ever(self) -> None:
        """Tell the core the time, publish what it decides, commit."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._tick_seconds)
            self._wake.clear()
            async with self._lock:
                await self._publisher.publish([*self._caught_up(), *self.core.on_tick(time.time())], {})
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
            await self._consumer.commit(offsets)
        except (CommitFailedError, IllegalStateError, KafkaError) as error:
            logger.warning("offsets were not committed: %r", error)
        else:
            self._committed |= moved

    async def leave(self) -> None:
        """Last commit before the consumer stops."""
        async with self._lock:
            await self._commit()

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            logger.critical("stage stops: %r", error, exc_info=error)
            self.failure = error
            self.failed.set()


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, stage: Stage, consumer_of: Callable[[], Any]) -> None:
        self._stage = stage
        self._consumer_of = consumer_of

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        await self._stage.assigned(self._consumer_of(), assigned)

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        await self._stage.revoked(revoked)


class StageApp(FastStream):
    """A FastStream app with one subscriber and its stage."""

    stage: Stage


def stage_app(
    settings: LogSettings,
    core: StageCore,
    topics: Sequence[TopicSpec],
    *,
    group_id: str,
    start_at_beginning: Sequence[TopicSpec] = (),
    tick_seconds: float = 1.0,
    also_run: Sequence[AlsoRun] = (),
) -> StageApp:
    """The app of one stage: ONE batch subscriber over all topics, so that the range assignor brings
    equal partitions to the same member. Topics in `start_at_beginning` are read from their first
    record at every start and never committed. `also_run`: tasks beside it; one that ends badly
    ends the app.
    """
    broker = KafkaBroker(
        bootstrap_servers(settings), client_id=group_id, apply_types=False, allow_auto_create_topics=False,
        consumer_only=True, logger=logger,
    )  # fmt: skip
    stage = Stage(
        settings,
        core,
        topics,
        name=group_id,
        start_at_beginning=start_at_beginning,
        tick_seconds=tick_seconds,
    )
    names = [topic.named(settings.topic_prefix) for topic in topics]
    listener = _Listener(stage, lambda: subscriber.consumer)
    subscriber = broker.subscriber(
        *names, group_id=group_id, batch=True, max_records=MAX_BATCH_RECORDS, batch_timeout_ms=20,
        ack_policy=AckPolicy.MANUAL, listener=listener, parser=_undecoded, decoder=_records,
        **subscriber_options(settings),
    )  # fmt: skip
    subscriber(stage.process)
    app = StageApp(broker, logger=logger)
    app.stage = stage
    tasks: list[asyncio.Task[None]] = []

    @app.on_startup
    async def start() -> None:
        await commit_first_offsets(settings, group_id, await _wait_for_log(settings, topics))
        await stage.writer.__aenter__()
        running = [stage.tick_for_ever(), _watch(stage, app), *(run(stage.writer) for run in also_run)]
        for coroutine in running:
            task = asyncio.ensure_future(coroutine)
            task.add_done_callback(lambda done: _note_end(done, stage))
            tasks.append(task)

    @app.on_shutdown
    async def leave() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await stage.leave()

    @app.after_shutdown
    async def close() -> None:
        await stage.writer.__aexit__(None, None, None)

    return app


async def run_stage(app: FastStream) -> None:
    """Run until SIGTERM or SIGINT. Raises StageFailedError when the stage cannot go on."""
    await app.run()
    failure = app.stage.failure if isinstance(app, StageApp) else None
    if failure is not None:
        raise StageFailedError(f"{type(failure).__name__}: {failure}") from failure


async def _wait_for_log(
    settings: LogSettings, topics: Sequence[TopicSpec]
) -> dict[Partition, tuple[int, int]]:
    """Offset ranges of the topics, once the broker answers and the topics are there."""
    everything = [
        Partition(topic.suffix, number)
        for topic in topics
        for number in range(partition_count(settings, topic))
    ]
    while True:
        try:
            return await offset_ranges(settings, everything)
        except LogUnavailableError as error:
            logger.warning("waiting for the log: %s", error)


async def _watch(stage: Stage, app: FastStream) -> None:
    """End the app when the stage failed."""
    await stage.failed.wait()
    app.exit()


def _note_end(task: asyncio.Task[None], stage: Stage) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        stage._fail(error)  # noqa: SLF001


async def _undecoded(message: Any) -> KafkaMessage:
    """FastStream's own parser fails on header bytes that are no text; ours leaves them alone."""
    return KafkaMessage(body=b"", raw_message=message, consumer=FAKE_CONSUMER)


async def _records(message: KafkaMessage) -> Any:
    return message.raw_message
