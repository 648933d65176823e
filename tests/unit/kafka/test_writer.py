"""The writer against a producer whose acknowledgements the test gives."""

import asyncio
from typing import Any, NamedTuple

import pytest
from aiokafka.errors import KafkaConnectionError, KafkaError, UnknownError

from polar.core.stage import Emit, Partition
from polar.errors import LogUnavailableError, RecordTooLargeError, SettingsError
from polar.kafka import writer as writer_module
from polar.kafka.writer import LogWriter, record_size
from polar.settings import LogSettings
from schemas.dead_letters import DeadLetter
from schemas.topics import DEAD_LETTERS, REWARDS
from tests.unit.kafka.consumer_records import PREFIX, reward

SETTINGS = LogSettings(bootstrap_servers="broker:1", topic_prefix=PREFIX, send_timeout_seconds=0.2)


class Metadata(NamedTuple):
    topic: str
    partition: int
    offset: int


class Producer:
    """Keeps sends; `acknowledge` settles them."""

    starts: list[Exception] = []
    made: list["Producer"] = []

    def __init__(self, *, idempotent: bool = True) -> None:
        self.idempotent = idempotent
        self.sent: list[tuple[str, bytes | None, bytes | None, asyncio.Future[Any]]] = []
        self.acknowledges_at_once = True
        Producer.made.append(self)

    async def start(self) -> None:
        if Producer.starts:
            raise Producer.starts.pop(0)

    async def send(
        self, topic: str, value: bytes | None, key: bytes | None, **_: Any
    ) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.sent.append((topic, key, value, future))
        if self.acknowledges_at_once:
            self.acknowledge(len(self.sent) - 1)
        return future

    def acknowledge(self, index: int) -> None:
        topic, *_, future = self.sent[index]
        future.set_result(Metadata(topic, 0, index))


@pytest.fixture(autouse=True)
def producers(monkeypatch: pytest.MonkeyPatch) -> list[Producer]:
    Producer.made, Producer.starts = [], []

    async def close(producer: Producer) -> None:
        pass

    monkeypatch.setattr(
        writer_module, "new_producer", lambda _, *, idempotent: Producer(idempotent=idempotent)
    )
    monkeypatch.setattr(writer_module, "verify_retries", lambda producer, settings: None)
    monkeypatch.setattr(writer_module, "close_producer", close)
    monkeypatch.setattr(writer_module, "RETRY_SECONDS", 0.01)
    return Producer.made


async def test_a_write_returns_the_position_without_the_prefix(producers: list[Producer]) -> None:
    async with LogWriter(SETTINGS) as writer:
        assert await writer.write(reward("a")) == (Partition("rewards.v1", 0), 0)
    (sent,) = producers[0].sent
    assert sent[:2] == ("t.rewards.v1", b"g")


async def test_a_record_that_was_not_acknowledged_in_time_is_never_sent_again(
    producers: list[Producer],
) -> None:
    async with LogWriter(SETTINGS) as writer:
        await writer.write(reward("a"))
        producers[0].acknowledges_at_once = False
        for _ in range(2):
            with pytest.raises(LogUnavailableError):
                await writer.write(reward("b"))
        assert len(producers[0].sent) == 2
        producers[0].acknowledge(1)
        assert await writer.write(reward("b")) == (Partition("rewards.v1", 0), 1)
        assert len(producers[0].sent) == 2
        assert writer.sends_rejoined == 2


async def test_a_cancelled_write_is_joined_by_the_next_one(producers: list[Producer]) -> None:
    async with LogWriter(SETTINGS) as writer:
        await writer.write(reward("a"))
        producers[0].acknowledges_at_once = False
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.write(reward("b")), 0.02)
        second = asyncio.create_task(writer.write(reward("b")))
        await asyncio.sleep(0.02)
        producers[0].acknowledge(1)
        assert (await second)[1] == 1
        assert len(producers[0].sent) == 2


async def test_a_repeated_batch_sends_only_what_was_never_sent(producers: list[Producer]) -> None:
    emits = [Emit(reward(name)) for name in "abc"]
    async with LogWriter(SETTINGS) as writer:
        await writer.write(reward("first"))
        producers[0].acknowledges_at_once = False
        with pytest.raises(LogUnavailableError):
            await writer.write_many(emits[:2])
        producers[0].acknowledge(1)
        producers[0].acknowledge(2)
        producers[0].acknowledges_at_once = True
        positions = await writer.write_many(emits)
        assert [offset for _, offset in positions] == [1, 2, 3]


async def test_a_send_that_failed_for_good_may_be_sent_again(producers: list[Producer]) -> None:
    async with LogWriter(SETTINGS) as writer:
        await writer.write(reward("a"))
        producers[0].acknowledges_at_once = False
        task = asyncio.create_task(writer.write(reward("b")))
        await asyncio.sleep(0.02)
        producers[0].sent[1][3].set_exception(KafkaConnectionError("gone"))
        with pytest.raises(LogUnavailableError):
            await task
        producers[0].acknowledges_at_once = True
        await writer.write(reward("b"))
        assert len(producers[0].sent) == 3


async def test_sizes_are_checked_before_anything_is_sent(producers: list[Producer]) -> None:
    limit = REWARDS.max_message_bytes
    async with LogWriter(SETTINGS) as writer:
        await writer.write_raw(REWARDS, b"k", b"x" * (limit - 3), {"h": b"v"})
        with pytest.raises(RecordTooLargeError, match=str(limit + 1)):
            await writer.write_raw(REWARDS, b"k", b"x" * (limit - 2), {"h": b"v"})
    assert len(producers[0].sent) == 1
    assert record_size(None, None, [("ä", b"1")]) == 3


async def test_a_dead_letter_over_the_limit_keeps_its_coordinates(producers: list[Producer]) -> None:
    letter = DeadLetter(
        source_topic="calls.v1", source_partition=1, source_offset=2, stage="s", reason="invalid", detail="d"
    )
    async with LogWriter(SETTINGS) as writer:
        await writer.write_dead_letter(letter, b"k", b"x" * DEAD_LETTERS.max_message_bytes)
    ((topic, key, value, _),) = producers[0].sent
    assert (topic, key, value) == ("t.dead-letters.v1", b"calls.v1", None)


async def test_unacknowledged_bytes_are_bounded(
    producers: list[Producer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_UNACKNOWLEDGED_BYTES", 25)
    async with LogWriter(SETTINGS) as writer:
        await writer.write_raw(REWARDS, b"k", b"")
        producers[0].acknowledges_at_once = False
        tasks = [asyncio.create_task(writer.write_raw(REWARDS, b"k", b"%010d" % n)) for n in range(3)]
        await asyncio.sleep(0.05)
        assert len(producers[0].sent) == 3
        assert writer.unacknowledged_bytes == 22
        producers[0].acknowledge(1)
        await asyncio.sleep(0.05)
        assert len(producers[0].sent) == 4
        producers[0].acknowledge(2)
        producers[0].acknowledge(3)
        await asyncio.gather(*tasks)
        assert writer.unacknowledged_bytes == 0


async def test_a_broker_without_producer_ids_gets_verified_retries(producers: list[Producer]) -> None:
    Producer.starts = [KafkaConnectionError("not up"), UnknownError()]
    async with LogWriter(SETTINGS) as writer:
        await writer.write(reward("a"))
    assert [producer.idempotent for producer in producers] == [True, True, False]


async def test_a_broken_producer_is_replaced(producers: list[Producer]) -> None:
    async with LogWriter(SETTINGS) as writer:
        await writer.write(reward("a"))
        producers[0].acknowledges_at_once = False
        task = asyncio.create_task(writer.write(reward("b")))
        await asyncio.sleep(0.02)
        producers[0].sent[1][3].set_exception(KafkaError("Unexpected error during batch delivery"))
        with pytest.raises(LogUnavailableError):
            await task
        await writer.write(reward("b"))
    assert len(producers) == 2
    assert len(producers[1].sent) == 1


async def test_where_nothing_is_sent_no_broker_is_waited_for(producers: list[Producer]) -> None:
    Producer.starts = [KafkaConnectionError()] * 9
    async with LogWriter(SETTINGS) as writer:
        assert await writer.write_many([]) == []
        assert not writer.is_connected
    assert not any(producer.sent for producer in producers)


async def test_without_a_broker_it_says_what_to_type() -> None:
    with pytest.raises(SettingsError, match="POLAR_BOOTSTRAP_SERVERS"):
        async with LogWriter(LogSettings(bootstrap_servers="")):
            pass
