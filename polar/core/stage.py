"""What a stream stage is: a pure core that a thin shell (polar.kafka.stage) drives.

The shell reads records, calls the core, publishes what the core returns, flushes, and only
then commits `commit_offsets()`. After a restart the core sees every record above the
committed offsets again and must come to the same state.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from polar.core.metrics import Metrics
from schemas.base import Event


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """A partition of a topic; `topic` is the suffix in schemas.topics (without prefix)."""

    topic: str
    number: int


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A decoded record with its coordinates."""

    partition: Partition
    offset: int
    key: str
    event: Event
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Emit:
    """Publish this event on its topic (schemas.topics.TOPIC_OF)."""

    event: Event
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """List this record among the dead letters; the shell still has its raw bytes."""

    record: LogRecord
    reason: str
    detail: str = ""


Output = Emit | DeadLettered


class StageCore(Protocol):
    """A pure stage. All methods are synchronous; outputs are published in order."""

    def on_assigned(self, ends: Mapping[Partition, tuple[int, int]]) -> None:
        """Partitions were assigned: partition → (first offset to be read, end offset now).

        Records below the end offset at assignment are the catch-up zone: the core may have
        seen them before a restart.
        """

    def on_revoked(self, partitions: Iterable[Partition]) -> None:
        """Forget all state of these partitions; another member owns them now."""

    def on_record(self, record: LogRecord, now: float) -> list[Output]:
        """Process one record. Records of one partition come in offset order."""

    def on_caught_up(self, partition: Partition, now: float) -> list[Output]:
        """Called once per assignment when every record below the end offset was processed."""

    def on_tick(self, now: float) -> list[Output]:
        """Time passes (about once a second). Decisions taken here are written as events."""

    def commit_offsets(self) -> Mapping[Partition, int]:
        """Next offset to read per partition after a restart: never above the opening record
        of an open key. Partitions left out are not committed."""

    def metrics(self) -> Metrics:
        """Gauges of the core: open keys, held records, duplicates, late records …"""
