"""Records as aiokafka hands them out, and a consumer that only has positions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import IllegalStateError
from aiokafka.structs import OffsetAndMetadata

from schemas.base import encode
from schemas.rewards import Reward
from schemas.topics import REWARDS

PREFIX = "t"


@dataclass(frozen=True)
class Fetched:
    """What polar reads of a ConsumerRecord."""

    topic: str
    partition: int
    offset: int
    value: bytes | None
    key: bytes | None = b"g"
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp: int = 0


def reward(name: str, group: str = "g") -> Reward:
    return Reward(reward_id=name, session_id="g/0/0/0", group_id=group, name="n", value=1.0, evaluator="e")


def fetched(offset: int, *, partition: int = 0, value: bytes | None = None, timestamp: int = 0) -> Fetched:
    """A reward with the id `r<partition>.<offset>`, or other bytes."""
    body = encode(reward(f"r{partition}.{offset}")) if value is None else value
    return Fetched(REWARDS.named(PREFIX), partition, offset, body, timestamp=timestamp)


def tp(partition: int = 0) -> TopicPartition:
    return TopicPartition(REWARDS.named(PREFIX), partition)


class PositionsOnly:
    """Stands where it was sought; `fetch` moves it like getmany would."""

    class _Fetcher:
        _fetch_max_wait_ms = 0

    def __init__(self, committed: Mapping[TopicPartition, int] | None = None) -> None:
        self.positions: dict[TopicPartition, int] = {}
        self.committed_offsets: dict[TopicPartition, int | None] = dict(committed or {})
        self.paused: set[TopicPartition] = set()
        self.commits: list[dict[TopicPartition, int]] = []
        self.polls: dict[TopicPartition, int] = {}
        self.ends: dict[TopicPartition, int] = {}
        self._fetcher = self._Fetcher()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.positions[partition] = offset

    def pause(self, *partitions: TopicPartition) -> None:
        self.paused |= set(partitions)

    def resume(self, *partitions: TopicPartition) -> None:
        self.paused -= set(partitions)

    async def position(self, partition: TopicPartition) -> int:
        if partition not in self.positions:
            raise IllegalStateError(f"{partition} is not assigned")
        return self.positions[partition]

    async def committed(self, partition: TopicPartition) -> int | None:
        return self.committed_offsets.get(partition)

    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        self.commits.append({partition: item.offset for partition, item in offsets.items()})

    def highwater(self, partition: TopicPartition) -> int | None:
        return self.ends.get(partition)

    def last_poll_timestamp(self, partition: TopicPartition) -> int | None:
        return self.polls.get(partition)

    def fetch(self, records: Iterable[Any]) -> list[Any]:
        items = list(records)
        for item in items:
            self.positions[TopicPartition(item.topic, item.partition)] = item.offset + 1
        return items


@dataclass
class KeptWrites:
    """In place of a LogWriter: keeps what is written, can be told to refuse."""

    events: list[Any] = field(default_factory=list)
    letters: list[tuple[Any, bytes | None, bytes | None]] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    unacknowledged_bytes: int = 0

    async def write_many(self, emits: Iterable[Any]) -> list[Any]:
        if self.failures:
            raise self.failures.pop(0)
        self.events += [emit.event for emit in emits]
        return []

    async def write_dead_letter(self, letter: Any, key: bytes | None, value: bytes | None) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.letters.append((letter, key, value))
