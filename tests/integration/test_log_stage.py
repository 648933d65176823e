"""Stages on real brokers: groups, assignors, dead letters and their way back."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping

import pytest

from polar.core.stage import Emit, LogRecord, Output, Partition
from polar.kafka.dead_letters import letter_of, source_of
from polar.kafka.reader import read_all, read_all_raw
from polar.kafka.stage import StageApp, StageFailedError, run_stage, stage_app
from polar.kafka.writer import LogWriter
from polar.settings import LogSettings
from schemas.base import encode
from schemas.topics import DEAD_LETTERS, GROUP_EVENTS, POLICIES, REWARDS, TRAJECTORIES, TopicSpec
from tests.integration.log_samples import every_event, reward, rewards, seal_of, until

pytestmark = pytest.mark.kafka


class NotingCore:
    """Notes what it is told; seals rewards."""

    def __init__(self) -> None:
        self.mine: set[Partition] = set()
        self.ends: dict[Partition, tuple[int, int]] = {}
        self.caught_up: set[Partition] = set()
        self.events: list[str] = []
        self.following: dict[Partition, int] = {}

    def on_assigned(self, ends: Mapping[Partition, tuple[int, int]]) -> None:
        self.ends = dict(ends)
        self.mine |= set(ends)

    def on_revoked(self, partitions: Iterable[Partition]) -> None:
        self.mine -= set(partitions)

    def on_record(self, record: LogRecord, now: float) -> list[Output]:
        self.following[record.partition] = record.offset + 1
        self.events.append(f"{record.partition.topic}:{record.partition.number}@{record.offset}")
        return [Emit(seal_of(record.event))] if record.partition.topic == REWARDS.suffix else []  # type: ignore[arg-type]

    def on_caught_up(self, partition: Partition, now: float) -> list[Output]:
        self.caught_up.add(partition)
        return []

    def on_tick(self, now: float) -> list[Output]:
        return []

    def commit_offsets(self) -> Mapping[Partition, int]:
        return self.following

    def metrics(self) -> Mapping[str, float]:
        return {}


@contextlib.asynccontextmanager
async def running(
    settings: LogSettings, core: NotingCore, *topics: TopicSpec, **options: object
) -> AsyncIterator[StageApp]:
    app = stage_app(
        settings, core, topics, group_id=f"{settings.topic_prefix}.noting", tick_seconds=0.2, **options
    )  # type: ignore[arg-type]
    task = asyncio.create_task(run_stage(app))
    try:
        yield app
    finally:
        app.exit()
        await asyncio.wait_for(task, 60)


async def test_first_start_from_the_beginning_then_from_the_commit(log_settings: LogSettings) -> None:
    async with LogWriter(log_settings) as writer:
        await writer.write_many(rewards(30))
    first = NotingCore()
    async with running(log_settings, first, REWARDS) as app:
        await until(lambda: len(first.events) == 30, "all old records")
        await until(lambda: len(first.caught_up) == 2, "both partitions are at their end")
        assert {start for start, _ in first.ends.values()} == {0}
        assert app.stage.metrics()["records"] == 30
    async with LogWriter(log_settings) as writer:
        await writer.write_many(rewards(5, start=30))
    second = NotingCore()
    async with running(log_settings, second, REWARDS):
        await until(lambda: len(second.events) == 5, "only the new records")
        await until(lambda: len(second.caught_up) == 2, "both partitions are at their end")
    assert len(await read_all(log_settings, GROUP_EVENTS)) == 35


async def test_small_topics_are_read_from_the_beginning_at_every_start(log_settings: LogSettings) -> None:
    (policy,) = [event for event in every_event() if type(event) in POLICIES.models]
    async with LogWriter(log_settings) as writer:
        await writer.write(policy)
    for _ in range(2):
        core = NotingCore()
        async with running(log_settings, core, REWARDS, POLICIES, start_at_beginning=[POLICIES]):
            await until(lambda core=core: core.events == ["policies.v1:0@0"], "the policy is read")  # type: ignore[misc]
            await until(lambda core=core: len(core.caught_up) == 3, "all partitions are at their end")  # type: ignore[misc]


async def test_two_members_share_and_equal_partitions_come_together(log_settings: LogSettings) -> None:
    topics = (TRAJECTORIES, REWARDS, GROUP_EVENTS)
    cores = [NotingCore(), NotingCore()]
    async with running(log_settings, cores[0], *topics):
        await until(lambda: len(cores[0].mine) == 6, "the first member has everything")
        async with running(log_settings, cores[1], *topics) as second:
            await until(lambda: all(len(core.mine) == 3 for core in cores), "each member has a half", 90)
            for core in cores:
                assert len({partition.number for partition in core.mine}) == 1
                assert {partition.topic for partition in core.mine} == {topic.suffix for topic in topics}
            async with LogWriter(log_settings) as writer:
                await writer.write_many(rewards(20))
            await until(
                lambda: sum(e.startswith("rewards") for c in cores for e in c.events) == 20, "all records"
            )
            assert second.stage.failure is None
        await until(lambda: len(cores[0].mine) == 6, "the first member has everything again", 90)


async def test_poison_goes_to_the_dead_letters_and_can_be_delivered_again(log_settings: LogSettings) -> None:
    newer = json.loads(encode(reward(2, groups=1))) | {"schema_version": 2}
    values = {
        "not_json": b"\x00\xff",
        "schema_version": json.dumps(newer).encode(),
        "wrong_topic": encode(seal_of(reward(9))),
    }
    core = NotingCore()
    async with LogWriter(log_settings) as writer, running(log_settings, core, REWARDS) as app:
        await writer.write(reward(1, groups=1))
        places = {
            reason: await writer.write_raw(REWARDS, b"g0", value, {"h": b"\xff"})
            for reason, value in values.items()
        }
        places["tombstone"] = await writer.write_raw(REWARDS, b"g0", None)
        await writer.write(reward(3, groups=1))
        await until(
            lambda: len(core.events) == 2 and app.stage.counts["unreadable"] == 4,
            "the neighbours are processed",
        )
        raws = await read_all_raw(log_settings, DEAD_LETTERS)
        letters = {source_of(letter_of(raw)[0]): raw for raw in raws}
        assert set(letters) == set(places.values())
        for reason, value in values.items():
            letter, key = letter_of(letters[places[reason]])
            assert (letter.reason, letter.stage, key) == (
                reason,
                f"{log_settings.topic_prefix}.noting",
                b"g0",
            )
            assert letters[places[reason]].value == value
        # A reader that knows the newer version delivers it again, under the same id and once.
        raw = letters[places["schema_version"]]
        upgraded = json.dumps(json.loads(raw.value or b"") | {"schema_version": 1}).encode()
        await writer.write_raw(REWARDS, letter_of(raw)[1], upgraded)
        await until(lambda: len(core.events) == 3, "the restored record is processed")
    sealed = [record.event.reward_ids[0] for record in await read_all(log_settings, GROUP_EVENTS)]  # type: ignore[attr-defined]
    assert sealed == ["r1", "r3", "r2"]


async def test_a_task_beside_the_stage_that_fails_ends_it(log_settings: LogSettings) -> None:
    async def beside(writer: LogWriter) -> None:
        await writer.write(reward(1))
        raise OSError("port is taken")

    app = stage_app(
        log_settings,
        NotingCore(),
        [REWARDS],
        group_id=f"{log_settings.topic_prefix}.beside",
        also_run=[beside],
    )
    with pytest.raises(StageFailedError, match="port is taken"):
        await asyncio.wait_for(run_stage(app), 60)
    assert len(await read_all(log_settings, REWARDS)) == 1
