"""Brokers and stages that are killed with -9: nothing acknowledged is lost, nothing counts twice."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from polar.core.stage import Emit
from polar.errors import LogUnavailableError
from polar.kafka.brokers import OwnBroker
from polar.kafka.reader import follow, read_all
from polar.kafka.writer import LogWriter
from polar.settings import LogSettings
from schemas.topics import GROUP_EVENTS, REWARDS
from tests.brokers import kill
from tests.integration.log_samples import reward, rewards, until

pytestmark = pytest.mark.kafka


async def test_acknowledged_records_survive_kills_of_the_broker_once_each(
    log_settings: LogSettings, any_broker: OwnBroker
) -> None:
    programs = list(any_broker.pids)
    rounds = [[name] for name in programs] + ([programs] if len(programs) > 1 else [])
    acknowledged: dict[str, tuple[object, int]] = {}
    seen: list[str] = []
    stopping = asyncio.Event()

    async def write() -> None:
        async with LogWriter(log_settings.model_copy(update={"send_timeout_seconds": 120.0})) as writer:
            number = 0
            while not stopping.is_set():
                acknowledged[f"r{number}"] = await writer.write(reward(number))
                number += 1
                await asyncio.sleep(0.005)

    async def read() -> None:
        async for record in follow(log_settings, REWARDS):
            seen.append(record.event.reward_id)  # type: ignore[attr-defined]

    reader, task = asyncio.create_task(read()), asyncio.create_task(write())
    for names in rounds:
        written = len(acknowledged)
        await until(lambda written=written: len(acknowledged) > written + 15, "records are written")  # type: ignore[misc]
        await asyncio.to_thread(kill, any_broker, *names)
    written = len(acknowledged)
    await until(lambda: len(acknowledged) > written + 15, "records are written after the last kill")
    stopping.set()
    await task
    records = await read_all(log_settings, REWARDS)
    places = {record.event.reward_id: (record.partition, record.offset) for record in records}  # type: ignore[attr-defined]
    assert places == acknowledged, "each acknowledged record stands where its acknowledgement said"
    assert len(records) == len(places), "none stands there twice"
    await until(lambda: len(seen) >= len(places), "the reader sees them all")
    reader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reader
    assert sorted(seen) == sorted(places)


async def test_a_broker_that_is_down_is_an_error_and_the_record_is_sent_once(
    log_settings: LogSettings, any_broker: OwnBroker
) -> None:
    (server,) = [pid for name, pid in any_broker.pids.items() if name != "object-store"]
    impatient = log_settings.model_copy(update={"send_timeout_seconds": 1.0})
    async with LogWriter(impatient) as writer:
        await writer.write(reward(0))
        os.kill(server, signal.SIGSTOP)
        try:
            with pytest.raises(LogUnavailableError, match="may or may not be on the log"):
                await writer.write(reward(1))
            with pytest.raises(LogUnavailableError):
                await writer.write_many([Emit(reward(1)), Emit(reward(2))])
        finally:
            os.kill(server, signal.SIGCONT)
        deadline = time.monotonic() + 60
        while True:
            try:
                await writer.write_many([Emit(reward(1)), Emit(reward(2)), Emit(reward(3))])
                break
            except LogUnavailableError:
                assert time.monotonic() < deadline
        assert writer.sends_rejoined > 0
    ids = [record.event.reward_id for record in await read_all(log_settings, REWARDS)]  # type: ignore[attr-defined]
    assert sorted(ids) == ["r0", "r1", "r2", "r3"]


async def test_a_writer_may_start_before_its_broker_answers(
    log_settings: LogSettings, any_broker: OwnBroker
) -> None:
    (server,) = [pid for name, pid in any_broker.pids.items() if name != "object-store"]
    os.kill(server, signal.SIGSTOP)
    try:
        writer = LogWriter(log_settings)
        await writer.__aenter__()
        assert not writer.is_connected
        pending = asyncio.create_task(writer.write(reward(0)))
        await asyncio.sleep(0.2)
    finally:
        os.kill(server, signal.SIGCONT)
    await asyncio.wait_for(pending, 60)
    await writer.__aexit__(None, None, None)
    assert len(await read_all(log_settings, REWARDS)) == 1


@contextlib.contextmanager
def stage_process(settings: LogSettings, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "POLAR_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "POLAR_TOPIC_PREFIX": settings.topic_prefix,
        "POLAR_SESSION_PARTITIONS": str(settings.session_partitions),
        "POLAR_GROUP_PARTITIONS": str(settings.group_partitions),
        "POLAR_FETCH_MAX_WAIT_MS": str(settings.fetch_max_wait_ms),
        "POLAR_MEMBER_ID": "0",
    }
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.stage_process"],
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def committed_records(settings: LogSettings) -> int:
    """Offsets that the stage process has committed, over all partitions."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=settings.bootstrap_servers, group_id=f"{settings.topic_prefix}.sealing"
    )
    await consumer.start()
    try:
        topic = REWARDS.named(settings.topic_prefix)
        numbers = range(settings.group_partitions)
        return sum([await consumer.committed(TopicPartition(topic, number)) or 0 for number in numbers])
    finally:
        await consumer.stop()


async def test_a_stage_killed_at_any_moment_misses_nothing(log_settings: LogSettings, tmp_path: Path) -> None:
    """Kill -9 in the middle, start again: every record has its output, in the order of its key; only
    records at or above the oldest open key come twice."""
    sealed: list[str] = []

    async def watch() -> None:
        async for record in follow(log_settings, GROUP_EVENTS):
            sealed.extend(record.event.reward_ids)  # type: ignore[attr-defined]

    watcher = asyncio.create_task(watch())
    log = tmp_path / "stage.log"
    async with LogWriter(log_settings) as writer:
        # Closed before the kill: committed and never read again.
        await writer.write_many(rewards(10, start=200, groups=1))
        with stage_process(log_settings, log):
            await until(lambda: len(sealed) >= 10, f"first outputs, see {log}")
            async with asyncio.timeout(30):
                while await committed_records(log_settings) < 10:  # noqa: ASYNC110 (another process commits)
                    await asyncio.sleep(0.1)
            await writer.write(reward(0, groups=1, text="open"))
            await writer.write_many(rewards(50, start=1, groups=1))
            await until(lambda: "r20" in sealed, "the middle of the records")
        first_life = len(sealed)
        assert first_life >= 31
        await writer.write_many(rewards(50, start=51, groups=1))
        with stage_process(log_settings, log):
            await until(lambda: len(set(sealed)) >= 111, "all outputs", 90)
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher
    assert set(sealed) == {f"r{number}" for number in [*range(101), *range(200, 210)]}
    second_life = sealed[first_life:]
    again = set(second_life) & set(sealed[:first_life])
    assert "r0" in second_life, "the opening record of the open key is read again"
    assert again <= {f"r{number}" for number in range(51)}, "what was closed and committed is not"
    numbers = [int(name[1:]) for name in second_life]
    assert numbers == sorted(numbers)


async def test_a_stage_outlives_an_outage_of_its_broker(
    log_settings: LogSettings, any_broker: OwnBroker, tmp_path: Path
) -> None:
    async with LogWriter(log_settings) as writer:
        await writer.write_many(rewards(20))
        with stage_process(log_settings, tmp_path / "stage.log") as process:
            sealed: set[str] = set()

            async def watch() -> None:
                async for record in follow(log_settings, GROUP_EVENTS):
                    sealed.update(record.event.reward_ids)  # type: ignore[attr-defined]

            watcher = asyncio.create_task(watch())
            await until(lambda: len(sealed) >= 20, "outputs before the outage")
            await asyncio.to_thread(kill, any_broker)
            await writer.write_many(rewards(20, start=20))
            await until(lambda: len(sealed) >= 40, "outputs after the outage", 120)
            assert process.poll() is None, "the same process goes on"
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
