"""Records out, without a consumer group: whole topics, endless streams, end offsets.

Invariant: an end offset is the high watermark of a fetch. The embedded broker's own answer to
"where does this partition end" is the start of its last batch + 1, and its answer by time is
wrong altogether; neither is asked for here, nor anywhere else in polar.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from typing import Any, Literal

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from polar.core.stage import LogRecord, Partition
from polar.errors import LogUnavailableError
from polar.kafka.clients import (
    RETRY_SECONDS,
    from_kafka,
    new_consumer,
    partition_count,
    retry_until,
    stop_quietly,
    to_kafka,
)
from polar.kafka.records import RawRecord, decode_record, raw_record
from polar.kafka.tail import CATCH_UP_WAIT_MS, GapGuard, HoleWatch, set_fetch_wait
from polar.settings import LogSettings
from schemas.codec import UnreadableRecordError
from schemas.topics import TOPICS, TopicSpec

logger = logging.getLogger(__name__)

UNREADABLE: Counter[str] = Counter()
"""Records that `read_all` and `follow` skipped in this process, by topic suffix."""

_POLL_MS = 200
_PROBE_WAIT_MS = 10
"""Long poll of a consumer that only wants the high watermark of an empty fetch."""
_MAX_RECORDS = 1000
_BEHIND_RECORDS = 10
SPECS = {topic.suffix: topic for topic in TOPICS}
"""Topics by suffix."""


def partitions_of(settings: LogSettings, topic: TopicSpec) -> list[Partition]:
    """All partitions of a topic."""
    return [Partition(topic.suffix, number) for number in range(partition_count(settings, topic))]


async def end_offsets(settings: LogSettings, topic: TopicSpec) -> dict[Partition, int]:
    """Offset after the last record of each partition; right on every broker.

    Raises LogUnavailableError.
    """
    return await end_offsets_of(settings, partitions_of(settings, topic))


async def end_offsets_of(settings: LogSettings, partitions: Collection[Partition]) -> dict[Partition, int]:
    """The same for any partitions, also of several topics."""
    return {partition: end for partition, (_, end) in (await offset_ranges(settings, partitions)).items()}


async def offset_ranges(
    settings: LogSettings, partitions: Collection[Partition]
) -> dict[Partition, tuple[int, int]]:
    """Partition → (first offset still there, offset after the last record)."""
    if not partitions:
        return {}
    return await retry_until(
        lambda: _offset_ranges(settings, partitions),
        seconds=settings.send_timeout_seconds,
        what="reading end offsets",
    )


async def read_all(
    settings: LogSettings, topic: TopicSpec, *, start: Mapping[int, int] | None = None
) -> list[LogRecord]:
    """Every readable record up to the present end, ordered by partition and offset.

    `start`: partition number → first offset; a partition left out is read from its beginning.
    Unreadable records are logged and counted in `UNREADABLE`. Raises LogUnavailableError.
    """
    return [
        record
        for raw in await read_all_raw(settings, topic, start=start)
        if (record := _decoded(raw, topic)) is not None
    ]


async def read_all_raw(
    settings: LogSettings, topic: TopicSpec, *, start: Mapping[int, int] | None = None
) -> list[RawRecord]:
    """The same without decoding: dead letters, archives."""
    named = {Partition(topic.suffix, number): offset for number, offset in (start or {}).items()}
    records = await _read_to_end(settings, partitions_of(settings, topic), named)
    raws = [raw_record(partition, item) for partition, item in records]
    return sorted(raws, key=lambda raw: (raw.partition, raw.offset))


async def read_from(settings: LogSettings, partition: Partition, offset: int) -> list[Any]:
    """aiokafka's records of one partition from `offset` to its present end."""
    records = await _read_to_end(settings, [partition], {partition: offset})
    return [item for _, item in records]


async def _read_to_end(
    settings: LogSettings, partitions: Collection[Partition], start: Mapping[Partition, int]
) -> list[tuple[Partition, Any]]:
    wanted: dict[Partition, int] = {}
    ends: dict[Partition, int] = {}
    for partition, (first, end) in (await offset_ranges(settings, partitions)).items():
        begin = max(first, start.get(partition, first))
        if begin < end:
            wanted[partition], ends[partition] = begin, end
    if not wanted:
        return []
    records: list[tuple[Partition, Any]] = []
    consumer = await _assigned_consumer(settings, wanted)
    holes, gaps, positions = HoleWatch(), GapGuard(), dict(wanted)
    last_progress = time.monotonic()
    try:
        while ends:
            batch = await _get_many(settings, consumer, positions, gaps)
            records.extend((partition, item) for partition, item in batch if item.offset < ends[partition])
            open_tps = {to_kafka(settings, partition): partition for partition in ends}
            done = {
                tp for tp, partition in open_tps.items() if await consumer.position(tp) >= ends[partition]
            }
            if batch or gaps.is_waiting:
                holes.records_came()
            else:
                done |= holes.at_hole(consumer, open_tps.keys() - done)
            for tp in done:
                del ends[open_tps[tp]]
                consumer.pause(tp)
            if batch or done:
                last_progress = time.monotonic()
            elif time.monotonic() - last_progress > settings.send_timeout_seconds:
                raise LogUnavailableError(
                    f"no record for {settings.send_timeout_seconds:g} s although these are not at their "
                    f"end: {sorted(ends)}"
                )
    finally:
        await stop_quietly(consumer.stop)
    return records


async def follow(
    settings: LogSettings,
    *topics: TopicSpec,
    start: Literal["beginning", "end"] | Mapping[Partition, int] = "beginning",
) -> AsyncGenerator[LogRecord, None]:
    """All records of these topics as they come, for ever; survives outages of the broker.

    `start`: a mapping names first offsets, partitions left out begin at their beginning.
    Unreadable records are skipped, logged and counted in `UNREADABLE`.
    """
    async with contextlib.aclosing(follow_raw(settings, *topics, start=start)) as raws:
        async for raw in raws:
            record = _decoded(raw, SPECS[raw.partition.topic])
            if record is not None:
                yield record


async def follow_raw(
    settings: LogSettings,
    *topics: TopicSpec,
    start: Literal["beginning", "end"] | Mapping[Partition, int] = "beginning",
) -> AsyncGenerator[RawRecord, None]:
    """The same without decoding."""
    positions = await _first_positions(settings, topics, start)
    while True:
        try:
            consumer = await _assigned_consumer(settings, positions)
        except LogUnavailableError as error:
            logger.warning("%s; trying on", error)
            continue
        gaps = GapGuard()
        try:
            while True:
                batch = await _get_many(settings, consumer, positions, gaps)
                # Many at once: more are waiting, and long fetches fetch them faster.
                is_behind = len(batch) >= _BEHIND_RECORDS
                set_fetch_wait(consumer, CATCH_UP_WAIT_MS if is_behind else settings.fetch_max_wait_ms)
                for partition, item in batch:
                    yield raw_record(partition, item)
        except OffsetOutOfRangeError as error:
            logger.error("records were deleted before they were read (%s); going on at the first left", error)  # noqa: TRY400
            await _skip_deleted(settings, positions)
        except KafkaError as error:
            logger.warning("reading failed (%r), connecting anew", error)
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            await stop_quietly(consumer.stop)


def _decoded(raw: RawRecord, topic: TopicSpec) -> LogRecord | None:
    try:
        return decode_record(raw, topic)
    except UnreadableRecordError as error:
        UNREADABLE[topic.suffix] += 1
        logger.warning("skipped %s/%d@%d: %s", topic.suffix, raw.partition.number, raw.offset, error)
        return None


async def _first_positions(
    settings: LogSettings,
    topics: Iterable[TopicSpec],
    start: Literal["beginning", "end"] | Mapping[Partition, int],
) -> dict[Partition, int]:
    partitions = [partition for topic in topics for partition in partitions_of(settings, topic)]
    while True:
        try:
            ranges = await offset_ranges(settings, partitions)
        except LogUnavailableError as error:
            logger.warning("%s; trying on", error)
            continue
        if start == "end":
            return {partition: end for partition, (_, end) in ranges.items()}
        named = {} if isinstance(start, str) else start
        return {p: max(first, named.get(p, first)) for p, (first, _) in ranges.items()}


async def _skip_deleted(settings: LogSettings, positions: dict[Partition, int]) -> None:
    with contextlib.suppress(LogUnavailableError):
        for partition, (first, end) in (await offset_ranges(settings, list(positions))).items():
            if not first <= positions[partition] <= end:
                positions[partition] = first


async def _assigned_consumer(settings: LogSettings, positions: Mapping[Partition, int]) -> AIOKafkaConsumer:
    """A started consumer that stands at these positions."""

    async def start() -> AIOKafkaConsumer:
        consumer = new_consumer(settings, fetch_max_wait_ms=max(CATCH_UP_WAIT_MS, settings.fetch_max_wait_ms))
        try:
            await consumer.start()
            _assign(settings, consumer, positions)
        except BaseException:
            await stop_quietly(consumer.stop)
            raise
        return consumer

    return await retry_until(start, seconds=settings.send_timeout_seconds, what="connecting a reader")


def _assign(settings: LogSettings, consumer: AIOKafkaConsumer, positions: Mapping[Partition, int]) -> None:
    # No await between: the fetcher never sees an assigned partition without a position.
    consumer.assign([to_kafka(settings, partition) for partition in positions])
    for partition, offset in positions.items():
        consumer.seek(to_kafka(settings, partition), offset)


async def _get_many(
    settings: LogSettings, consumer: AIOKafkaConsumer, positions: dict[Partition, int], gaps: GapGuard
) -> list[tuple[Partition, Any]]:
    """The next records, in order and without loss; moves `positions` behind them."""
    batches: Mapping[TopicPartition, list[Any]] = await consumer.getmany(
        timeout_ms=_POLL_MS, max_records=_MAX_RECORDS
    )
    records: list[tuple[Partition, Any]] = []
    has_gap = False
    for tp, items in batches.items():
        partition = from_kafka(settings, tp)
        ready, again = gaps.ready(partition, positions[partition], items, time.time())
        if again is not None:
            has_gap = True
            consumer.seek(tp, ready[-1].offset + 1 if ready else positions[partition])
        if ready:
            positions[partition] = ready[-1].offset + 1
            records.extend((partition, item) for item in ready)
    if has_gap and not records:
        await asyncio.sleep(_POLL_MS / 1000)
    return records


async def _offset_ranges(
    settings: LogSettings, partitions: Collection[Partition]
) -> dict[Partition, tuple[int, int]]:
    tps = {to_kafka(settings, partition): partition for partition in partitions}
    consumer = new_consumer(settings, fetch_max_wait_ms=_PROBE_WAIT_MS)
    try:
        await consumer.start()
        firsts = await consumer.beginning_offsets(list(tps))
        near_ends = await consumer.end_offsets(list(tps))
        # Fetching at the broker's own idea of the end costs at most one batch.
        _assign(settings, consumer, {partition: near_ends[tp] for tp, partition in tps.items()})
        marks: dict[Partition, int] = {}
        while len(marks) < len(tps):
            await consumer.getmany(timeout_ms=_PROBE_WAIT_MS)
            for tp, partition in tps.items():
                mark = consumer.highwater(tp)
                if partition not in marks and mark is not None:
                    # Nothing is ever shorter than what the broker said before.
                    marks[partition] = max(mark, near_ends[tp])
                    consumer.pause(tp)
        return {partition: (firsts[tp], marks[partition]) for tp, partition in tps.items()}
    finally:
        await stop_quietly(consumer.stop)
