"""The driver of a stage against a consumer and a writer that only note what happens."""

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from polar.core.stage import DeadLettered, Emit, LogRecord, Output, Partition
from polar.errors import LogUnavailableError, RecordTooLargeError
from polar.kafka import driver, outages
from polar.kafka.driver import Stage
from polar.settings import LogSettings
from schemas.base import encode
from schemas.group_events import GroupSealed
from schemas.topics import GROUPS, REWARDS, TRAJECTORIES, TopicSpec
from tests.unit.kafka.consumer_records import PREFIX, KeptWrites, PositionsOnly, fetched, tp

P0, P1 = Partition("rewards.v1", 0), Partition("rewards.v1", 1)
SETTINGS = LogSettings(bootstrap_servers="127.0.0.1:1", topic_prefix=PREFIX, group_partitions=2)


class Core:
    """Seals a group a record; refuses and fails where it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.following: dict[Partition, int] = {}
        self.refuse: set[int] = set()
        self.crash: set[int] = set()
        self.ends: dict[Partition, tuple[int, int]] = {}

    def on_assigned(self, ends: Mapping[Partition, tuple[int, int]]) -> None:
        self.ends |= ends
        self.following |= {partition: start for partition, (start, _) in ends.items()}

    def on_revoked(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self.following.pop(partition)

    def on_record(self, record: LogRecord, now: float) -> list[Output]:
        self.calls.append(f"{record.partition.number}@{record.offset}")
        self.following[record.partition] = record.offset + 1
        if record.offset in self.crash:
            raise RuntimeError("a bug")
        if record.offset in self.refuse:
            return [DeadLettered(record, "late_reward", "too late")]
        return [Emit(sealed(record.event.reward_id))]  # type: ignore[attr-defined]

    def on_caught_up(self, partition: Partition, now: float) -> list[Output]:
        self.calls.append(f"caught up {partition.number}")
        return [Emit(sealed(f"caught up {partition.number}"))]

    def on_tick(self, now: float) -> list[Output]:
        self.calls.append("tick")
        return []

    def commit_offsets(self) -> Mapping[Partition, int]:
        return self.following

    def metrics(self) -> Mapping[str, float]:
        return {"open_keys": 3.0}


def sealed(name: str) -> GroupSealed:
    return GroupSealed(group_id="g", trajectory_ids=(), reward_ids=(name,), reason="complete")


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> dict[Partition, tuple[int, int]]:
    """What the broker says about partitions."""
    answer = {P0: (0, 5), P1: (0, 0)}

    async def offset_ranges(settings: LogSettings, partitions: Any) -> dict[Partition, tuple[int, int]]:
        return {partition: answer.get(partition, (0, 0)) for partition in partitions}

    monkeypatch.setattr(driver, "offset_ranges", offset_ranges)
    return answer


def make(core: Core, topics: tuple[TopicSpec, ...] = (REWARDS,), **options: Any) -> tuple[Stage, KeptWrites]:
    stage, writes = Stage(SETTINGS, core, topics, name="stage", **options), KeptWrites()
    stage._publisher._writer = writes  # type: ignore[assignment]
    return stage, writes


def names(writes: KeptWrites) -> list[str]:
    return [event.reward_ids[0] for event in writes.events]


async def tick_once(stage: Stage) -> None:
    """One round of the ticker."""
    commits = stage._tick_seconds
    stage._wake.set()
    task = asyncio.create_task(stage.tick_for_ever())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert commits == stage._tick_seconds


async def test_first_start_reads_from_the_beginning_and_later_ones_from_the_commit(
    ranges: dict[Partition, tuple[int, int]],
) -> None:
    core, consumer = Core(), PositionsOnly({tp(1): 0})
    ranges |= {P0: (2, 9), P1: (0, 4)}
    stage, _ = make(core)
    await stage.assigned(consumer, [tp(0), tp(1)])
    assert core.ends == {P0: (2, 9), P1: (0, 4)}
    assert consumer.positions == {tp(0): 2, tp(1): 0}
    assert not consumer.paused
    consumer = PositionsOnly({tp(0): 5, tp(1): 3})
    await stage.assigned(consumer, [tp(0), tp(1)])
    assert core.ends == {P0: (5, 9), P1: (3, 4)}


async def test_topics_read_from_the_beginning_are_never_committed(
    ranges: dict[Partition, tuple[int, int]],
) -> None:
    core, consumer = Core(), PositionsOnly({tp(0): 4})
    stage, _ = make(core, start_at_beginning=[REWARDS])
    await stage.assigned(consumer, [tp(0)])
    assert core.ends == {P0: (0, 5)}
    await stage.process(consumer.fetch([fetched(0)]))
    await stage.leave()
    assert consumer.commits == []


@pytest.mark.parametrize(("committed", "lost"), [(-1, 0), (1, 1), (99, 1)])
async def test_a_commit_outside_the_log_is_no_silent_wait(
    ranges: dict[Partition, tuple[int, int]], committed: int, lost: int
) -> None:
    ranges[P0] = (3, 9)
    core, consumer = Core(), PositionsOnly({tp(0): committed})
    stage, _ = make(core)
    await stage.assigned(consumer, [tp(0)])
    assert consumer.positions[tp(0)] == 3
    assert stage.counts["lost_history"] == lost


async def test_outputs_leave_in_order_and_only_then_offsets_are_committed(
    ranges: dict[Partition, tuple[int, int]],
) -> None:
    core, consumer = Core(), PositionsOnly()
    stage, writes = make(core)
    await stage.assigned(consumer, [tp(0)])
    writes.failures = [LogUnavailableError("down"), LogUnavailableError("down")]
    outages.PAUSE_SECONDS, before = 0.0, outages.PAUSE_SECONDS
    try:
        await stage.process(consumer.fetch([fetched(offset) for offset in range(5)]))
    finally:
        outages.PAUSE_SECONDS = before
    assert names(writes) == ["r0.0", "r0.1", "r0.2", "r0.3", "r0.4", "caught up 0"]
    assert consumer.commits == []
    await tick_once(stage)
    assert consumer.commits == [{tp(0): 5}]
    await tick_once(stage)
    assert len(consumer.commits) == 1, "an offset that did not move is not committed again"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "not_json"),
        (b"\x28\xb5\x2f\xfd\x04\x58", "not_json"),
        (b"[1,2,3]", "not_json"),
        (b"\xff\xfe\x00\xff", "not_json"),
        (encode(sealed("x")), "wrong_topic"),
        (b'{"type":"Nothing"}', "unknown_type"),
        (b'{"type":"Reward","schema_version":999}', "schema_version"),
        (b'{"type":"Reward","session_id":"s"}', "invalid"),
    ],
)
async def test_a_poison_record_goes_aside_with_its_coordinates_and_its_neighbours_do_not(
    ranges: dict[Partition, tuple[int, int]], value: bytes, reason: str
) -> None:
    core, consumer = Core(), PositionsOnly()
    ranges[P0] = (0, 3)
    stage, writes = make(core)
    await stage.assigned(consumer, [tp(0)])
    await stage.process(consumer.fetch([fetched(0), fetched(1, value=value), fetched(2)]))
    assert names(writes) == ["r0.0", "r0.2", "caught up 0"]
    ((letter, key, raw),) = writes.letters
    assert (letter.source_topic, letter.source_partition, letter.source_offset) == ("rewards.v1", 0, 1)
    assert (letter.stage, letter.reason) == ("stage", reason)
    assert (key, raw) == (b"g", value)
    await tick_once(stage)
    assert consumer.commits == [{tp(0): 3}]


async def test_records_that_the_core_refuses_or_fails_on_go_aside_too(
    ranges: dict[Partition, tuple[int, int]],
) -> None:
    core, consumer = Core(), PositionsOnly()
    core.refuse, core.crash = {1}, {3}
    stage, writes = make(core)
    await stage.assigned(consumer, [tp(0)])
    records = [fetched(offset) for offset in range(5)]
    await stage.process(consumer.fetch(records))
    assert names(writes) == ["r0.0", "r0.2", "r0.4", "caught up 0"]
    assert [letter.reason for letter, _, _ in writes.letters] == ["late_reward", "stage_error"]
    assert [raw for _, _, raw in writes.letters] == [records[1].value, records[3].value]
    assert stage.failure is None


async def test_a_batch_that_was_fetched_before_a_rebalance_is_not_processed(
    ranges: dict[Partition, tuple[int, int]],
) -> None:
    core, consumer = Core(), PositionsOnly()
    stage, writes = make(core)
    await stage.assigned(consumer, [tp(0), tp(1)])
    stale = consumer.fetch([fetched(0), fetched(1)])
    await stage.revoked([tp(0), tp(1)])
    await stage.process(stale)
    await stage.assigned(consumer, [tp(0)])
    await stage.process(stale)
    assert core.calls == ["caught up 1"] or "0@0" not in core.calls
    assert stage.counts["stale_records"] == 4
    await stage.process(consumer.fetch([fetched(0), fetched(1)]))
    assert names(writes)[-2:] == ["r0.0", "r0.1"]


async def test_revoked_partitions_are_committed_first_and_then_forgotten(
    ranges: dict[Partition, tuple[int, int]],
) -> None:
    core, consumer = Core(), PositionsOnly()
    stage, _ = make(core)
    await stage.assigned(consumer, [tp(0)])
    await stage.process(consumer.fetch([fetched(0), fetched(1)]))
    await stage.revoked([tp(0)])
    assert consumer.commits == [{tp(0): 2}]
    assert core.following == {}


async def test_a_record_that_becomes_visible_late_is_processed_in_its_place(
    ranges: dict[Partition, tuple[int, int]],
) -> None:
    core, consumer = Core(), PositionsOnly()
    stage, writes = make(core)
    await stage.assigned(consumer, [tp(0)])
    young = int(time.time() * 1000)
    await stage.process(consumer.fetch([fetched(0, timestamp=young), fetched(2, timestamp=young)]))
    assert names(writes) == ["r0.0"]
    assert consumer.positions[tp(0)] == 1, "the records behind the gap are fetched again"
    await stage.process(consumer.fetch([fetched(1, timestamp=young), fetched(2, timestamp=young)]))
    assert names(writes) == ["r0.0", "r0.1", "r0.2"]


async def test_an_end_that_no_record_reaches_is_noticed(ranges: dict[Partition, tuple[int, int]]) -> None:
    core, consumer = Core(), PositionsOnly()
    stage, _ = make(core)
    await stage.assigned(consumer, [tp(0)])
    await stage.process(consumer.fetch([fetched(offset) for offset in range(4)]))
    assert "caught up 0" not in core.calls
    for poll in range(1, 8):
        consumer.polls[tp(0)] = poll
        await tick_once(stage)
    assert core.calls.count("caught up 0") == 1


async def test_nothing_goes_on_after_a_failure(ranges: dict[Partition, tuple[int, int]]) -> None:
    core, consumer = Core(), PositionsOnly()
    stage, writes = make(core)
    await stage.assigned(consumer, [tp(0)])
    writes.failures = [ValueError("a bug in the shell")]
    await stage.process(consumer.fetch([fetched(0)]))
    assert isinstance(stage.failure, ValueError)
    assert stage.failed.is_set()
    await stage.process(consumer.fetch([fetched(1)]))
    await tick_once(stage)
    await stage.leave()
    assert writes.events == []
    assert consumer.commits == []


async def test_equal_partitions_must_come_together(ranges: dict[Partition, tuple[int, int]]) -> None:
    topics = (TRAJECTORIES, GROUPS)
    stage, _ = make(Core(), topics)
    pairs = [tp(0)._replace(topic=topic.named(PREFIX)) for topic in topics]
    await stage.assigned(PositionsOnly(), pairs)
    assert stage.failure is None
    await stage.assigned(PositionsOnly(), [pairs[0], pairs[1]._replace(partition=1)])
    assert "equal partitions" in str(stage.failure)


async def test_metrics_hold_counts_gauges_and_lag(ranges: dict[Partition, tuple[int, int]]) -> None:
    consumer = PositionsOnly()
    stage, _ = make(Core())
    await stage.assigned(consumer, [tp(0)])
    consumer.ends[tp(0)] = 5
    await stage.process(consumer.fetch([fetched(0), fetched(1, value=b"?")]))
    metrics = stage.metrics()
    assert metrics["records"] == 2
    assert metrics["unreadable"] == 1
    assert metrics["outputs"] == 1
    assert metrics["lag_records"] == 3
    assert metrics["open_keys"] == 3


async def test_an_output_over_its_limit_is_listed_and_the_others_leave(
    ranges: dict[Partition, tuple[int, int]],
) -> None:
    core, consumer = Core(), PositionsOnly()
    ranges[P0] = (0, 9)
    stage, writes = make(core)
    await stage.assigned(consumer, [tp(0)])
    too_large = RecordTooLargeError("too many bytes")
    # the batch, then its records one by one
    writes.failures = [too_large, too_large]
    await stage.process(consumer.fetch([fetched(0), fetched(1), fetched(2)]))
    assert names(writes) == ["r0.1", "r0.2"]
    ((letter, key, value),) = writes.letters
    assert (letter.source_topic, letter.source_offset, letter.reason) == ("group-events.v1", -1, "too_large")
    assert (key, value) == (b"g", encode(sealed("r0.0")))
    assert stage.failure is None


class SlowCore(Core):
    """Works a while, as a packer does."""

    def __init__(self) -> None:
        super().__init__()
        self.is_working = False
        self.started, self.go_on = threading.Event(), threading.Event()

    def on_record(self, record: LogRecord, now: float) -> list[Output]:
        self.is_working = True
        self.started.set()
        assert self.go_on.wait(20)
        self.is_working = False
        return super().on_record(record, now)

    def metrics(self) -> Mapping[str, float]:
        assert not self.is_working, "the core was looked at while it worked"
        return super().metrics()


async def test_the_loop_goes_on_while_a_slow_core_works(ranges: dict[Partition, tuple[int, int]]) -> None:
    core, consumer = SlowCore(), PositionsOnly({tp(0): 0})
    stage, writes = make(core, in_thread=True)
    await stage.assigned(consumer, [tp(0)])
    processing = asyncio.create_task(stage.process(consumer.fetch([fetched(0), fetched(1)])))
    assert await asyncio.to_thread(core.started.wait, 10)
    for _ in range(5):  # what runs beside it: heartbeats, metrics
        await asyncio.sleep(0)
        assert stage.metrics()["open_keys"] == 3
    assert not processing.done()
    core.go_on.set()
    await processing
    assert core.calls == ["0@0", "0@1"]
    assert len(writes.events) == 2
    assert stage.failure is None


async def test_a_stage_that_is_cancelled_leaves_no_core_working(
    ranges: dict[Partition, tuple[int, int]],
) -> None:
    core, consumer = SlowCore(), PositionsOnly({tp(0): 0})
    stage, writes = make(core, in_thread=True)
    await stage.assigned(consumer, [tp(0)])
    processing = asyncio.create_task(stage.process(consumer.fetch([fetched(0)])))
    assert await asyncio.to_thread(core.started.wait, 10)
    processing.cancel()
    await asyncio.sleep(0.01)
    assert not processing.done()
    core.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await processing
    assert not core.is_working
    assert writes.events == []
