"""What is written comes back, on every kind of broker."""

import asyncio
import contextlib
import random

import pytest

from polar.core.stage import Emit
from polar.errors import LogUnavailableError, RecordTooLargeError, SettingsError
from polar.kafka.capabilities import probe
from polar.kafka.reader import UNREADABLE, end_offsets, follow, read_all, read_all_raw
from polar.kafka.topics import ensure_topics, missing_topics
from polar.kafka.writer import LogWriter, record_size
from polar.settings import LogSettings
from schemas.base import encode
from schemas.topics import BATCHES, CALLS, REWARDS, SESSIONS, TOPIC_OF, TOPICS
from tests.integration.log_samples import every_event, reward, rewards

pytestmark = pytest.mark.kafka


async def test_every_type_of_event_comes_back_equal(log_settings: LogSettings) -> None:
    events = every_event()
    async with LogWriter(log_settings) as writer:
        positions = await writer.write_many([Emit(event, {"name": type(event).__name__}) for event in events])
    for event, (partition, offset) in zip(events, positions, strict=True):
        topic = TOPIC_OF[type(event)]
        (record,) = [
            r for r in await read_all(log_settings, topic) if (r.partition, r.offset) == (partition, offset)
        ]
        assert record.event == event
        assert encode(record.event) == encode(event)
        assert record.key == topic.key_of(event)
        assert record.headers == {"name": type(event).__name__}


async def test_positions_ends_and_order_agree(log_settings: LogSettings) -> None:
    async with LogWriter(log_settings) as writer:
        positions = await writer.write_many(rewards(300))
    records = await read_all(log_settings, REWARDS)
    by_place = {(record.partition, record.offset): record for record in records}
    for number, place in enumerate(positions):
        assert by_place[place].event == reward(number)
    for partition, end in (await end_offsets(log_settings, REWARDS)).items():
        offsets = [record.offset for record in records if record.partition == partition]
        assert offsets == list(range(end))
    assert set((await end_offsets(log_settings, CALLS)).values()) == {0}
    assert await read_all(log_settings, CALLS) == []


async def test_reading_may_begin_anywhere(log_settings: LogSettings) -> None:
    async with LogWriter(log_settings) as writer:
        await writer.write_many(rewards(20, groups=1))
    records = await read_all(log_settings, REWARDS)
    number = records[0].partition.number
    tail = await read_all(log_settings, REWARDS, start={number: 15})
    assert [record.offset for record in tail] == list(range(15, 20))


async def test_follow_gives_the_old_then_the_new_and_skips_what_is_unreadable(
    log_settings: LogSettings,
) -> None:
    skipped = UNREADABLE["rewards.v1"]
    async with LogWriter(log_settings) as writer:
        await writer.write(reward(0))
        await writer.write_raw(REWARDS, b"g0", b"no json", {"odd": b"\xff\xfe"})
        async with contextlib.aclosing(follow(log_settings, REWARDS, SESSIONS)) as records:
            assert (await asyncio.wait_for(anext(records), 30)).event == reward(0)
            await writer.write(reward(1))
            assert (await asyncio.wait_for(anext(records), 30)).event == reward(1)
        async with contextlib.aclosing(follow(log_settings, REWARDS, start="end")) as records:
            newer = asyncio.ensure_future(anext(records))
            await asyncio.sleep(1.0)  # it must have taken the end before the next record comes
            await writer.write(reward(2))
            assert (await asyncio.wait_for(newer, 30)).event == reward(2)
    assert UNREADABLE["rewards.v1"] == skipped + 1


async def test_the_limit_of_a_record_is_inclusive_and_counts_key_and_headers(
    log_settings: LogSettings,
) -> None:
    limit = REWARDS.max_message_bytes
    headers = {"h": b"12"}
    room = limit - record_size(b"key", b"", tuple(headers.items()))
    async with LogWriter(log_settings) as writer:
        partition, offset = await writer.write_raw(REWARDS, b"key", b"\0" * (room - 1), headers)
        _, exact = await writer.write_raw(REWARDS, b"key", b"\1" * room, headers)
        with pytest.raises(RecordTooLargeError, match=f"{limit + 1} bytes"):
            await writer.write_raw(REWARDS, b"key", b"\2" * (room + 1), headers)
        with pytest.raises(RecordTooLargeError):
            await writer.write_many([Emit(reward(1)), Emit(reward(2, text="x" * limit))])
    raws = await read_all_raw(log_settings, REWARDS)
    sizes = [(raw.offset, len(raw.value or b"")) for raw in raws if raw.partition == partition]
    assert sizes == [(offset, room - 1), (exact, room)]
    assert len(raws) == 2, "nothing of a refused batch was sent"


async def test_a_record_of_the_largest_topic_that_does_not_compress_comes_back(
    log_settings: LogSettings,
) -> None:
    value = random.Random(1).randbytes(BATCHES.max_message_bytes - 100)
    async with LogWriter(log_settings) as writer:
        await writer.write_raw(BATCHES, b"k", value)
    (raw,) = await read_all_raw(log_settings, BATCHES)
    assert raw.value == value


async def test_topics_are_made_once_and_their_partitions_never_change(log_settings: LogSettings) -> None:
    await ensure_topics(log_settings)
    assert await missing_topics(log_settings) == []
    with pytest.raises(SettingsError, match="POLAR_GROUP_PARTITIONS"):
        await ensure_topics(log_settings.model_copy(update={"group_partitions": 3}))
    other = log_settings.model_copy(update={"topic_prefix": log_settings.topic_prefix + "x"})
    assert len(await missing_topics(other)) == len(TOPICS)


async def test_no_client_creates_a_topic_by_asking(log_settings: LogSettings) -> None:
    other = log_settings.model_copy(
        update={"topic_prefix": log_settings.topic_prefix + "y", "send_timeout_seconds": 2.0}
    )
    async with LogWriter(other) as writer:
        with pytest.raises(LogUnavailableError):
            await writer.write(reward(0))
    with pytest.raises(LogUnavailableError):
        await end_offsets(other, REWARDS)
    assert len(await missing_topics(other, TOPICS)) == len(TOPICS)


async def test_concurrent_writers_are_read_without_a_gap(log_settings: LogSettings) -> None:
    """On the embedded broker a later offset may be visible before an earlier one."""
    writers, each = 4, 25
    seen: list[int] = []

    async def read() -> None:
        async with contextlib.aclosing(follow(log_settings, REWARDS)) as records:
            async for record in records:
                seen.append(int(record.event.reward_id[1:]))  # type: ignore[attr-defined]
                if len(seen) == writers * each:
                    return

    async def write(first: int) -> None:
        async with LogWriter(log_settings) as writer:
            for number in range(first, first + each):
                await writer.write(reward(number, groups=1))

    reader = asyncio.create_task(read())
    await asyncio.gather(*(write(index * each) for index in range(writers)))
    await asyncio.wait_for(reader, 60)
    assert sorted(seen) == list(range(writers * each))
    for index in range(writers):
        own = [number for number in seen if number // each == index]
        assert own == sorted(own), "the order of each writer is kept"


async def test_capabilities_tell_the_kinds_apart(
    log_settings: LogSettings, request: pytest.FixtureRequest
) -> None:
    capabilities = await probe(log_settings.bootstrap_servers, "external")
    is_embedded = "embedded" in request.node.callspec.id
    assert capabilities.end_offsets is not is_embedded
    assert bool(capabilities.missing) is is_embedded
    assert capabilities.fetch_max_wait_ms == (100 if is_embedded else 500)


async def test_an_unreachable_broker_is_named() -> None:
    settings = LogSettings(bootstrap_servers="127.0.0.1:1", send_timeout_seconds=1.0)
    with pytest.raises(LogUnavailableError, match=r"127\.0\.0\.1:1 "):
        await probe("127.0.0.1:1", "external")
    with pytest.raises(LogUnavailableError, match="creating topics"):
        await ensure_topics(settings)
    with pytest.raises(SettingsError, match="POLAR_BOOTSTRAP_SERVERS"):
        await ensure_topics(LogSettings(bootstrap_servers=""))
