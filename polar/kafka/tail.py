"""How a consumer reads towards the end of a partition, on any broker.

Four facts of the embedded broker stand behind this. It takes an offset first and stores the batch
some milliseconds later, so:
- A batch can become visible *before* one with a lower offset that another producer writes at the
  same moment. A reader that takes it as it comes never sees the lower one. `GapGuard` waits.
- A broker killed in between leaves a *hole* for good: no record ever stands there.
- When the hole is the last offset of a partition, its high watermark lies beyond the last record:
  a reader that waits for the watermark would wait for ever. `HoleWatch` tells.
- A fetch is answered with what could be read within its longest wait; listing the stored batches
  takes most of it. At 20 ms a catch-up crawls (30 records/s, measured); at 500 ms it runs at the
  speed of the store. Near the end a short wait keeps the latency low.

On Apache Kafka offsets have gaps only where a topic was compacted or a transaction ended; the
former are exempt, the latter cost one pause.
"""

from collections.abc import Collection, Sequence
from typing import Any

from aiokafka import TopicPartition

from polar.core.stage import Partition
from schemas.topics import TOPICS

CATCH_UP_WAIT_MS = 500
SETTLE_SECONDS = 5.0
"""A write that has taken an offset is stored, or lost for good, so much later."""
_POLLS_OF_A_HOLE = 3
"""Empty answers below the high watermark, with nothing from elsewhere, that make a hole."""
_COMPACTED = frozenset(topic.suffix for topic in TOPICS if topic.kept == "compacted")


def set_fetch_wait(consumer: Any, milliseconds: int) -> None:
    """The longest wait of this consumer's next fetches. aiokafka only knows it at construction."""
    consumer._fetcher._fetch_max_wait_ms = milliseconds  # noqa: SLF001


class GapGuard:
    """Holds back records behind a gap until the gap is surely a hole."""

    def __init__(self) -> None:
        self._since: dict[tuple[Partition, int], float] = {}
        self.holes = 0
        """Gaps that turned out to be holes."""

    @property
    def is_waiting(self) -> bool:
        """Whether records of some partition are held back now."""
        return bool(self._since)

    def ready(
        self, partition: Partition, expected: int, records: Sequence[Any], now: float
    ) -> tuple[Sequence[Any], int | None]:
        """The leading records that may be processed, and the offset to fetch again from (None when
        all may). `expected`: the next offset of the partition; `now`: Unix seconds.

        A gap is settled when the record behind it is old, or was seen `SETTLE_SECONDS` ago.
        """
        if partition.topic in _COMPACTED:
            return records, None
        for index, record in enumerate(records):
            if record.offset > expected and not self._is_settled(partition, expected, record, now):
                return records[:index], expected
            if self._since:
                self._since.pop((partition, record.offset), None)
            expected = record.offset + 1
        return records, None

    def forget(self, partitions: Collection[Partition]) -> None:
        """Partitions that are read no more."""
        self._since = {key: seen for key, seen in self._since.items() if key[0] not in partitions}

    def _is_settled(self, partition: Partition, expected: int, record: Any, now: float) -> bool:
        first_seen = self._since.setdefault((partition, expected), now)
        if now - record.timestamp / 1000 < SETTLE_SECONDS and now - first_seen < SETTLE_SECONDS:
            return False
        del self._since[partition, expected]
        self.holes += 1
        return True


class HoleWatch:
    """Tells which partitions have nothing left although their high watermark says so.

    A broker that has records above a position answers a fetch there with records. Answers are
    told apart by their time; a partition counts only while nothing at all arrives, since an
    answer may also be empty because other partitions filled it.
    """

    def __init__(self) -> None:
        self._last_poll: dict[TopicPartition, int] = {}
        self._empty_polls: dict[TopicPartition, int] = {}

    def records_came(self) -> None:
        """Something arrived: begin again."""
        self._empty_polls.clear()

    def at_hole(self, consumer: Any, partitions: Collection[TopicPartition]) -> set[TopicPartition]:
        """Of these partitions, none of which is at its end, those that have nothing left."""
        for partition in partitions:
            polled_at = consumer.last_poll_timestamp(partition)
            if polled_at is not None and polled_at != self._last_poll.get(partition):
                self._last_poll[partition] = polled_at
                self._empty_polls[partition] = self._empty_polls.get(partition, 0) + 1
        return {tp for tp in partitions if self._empty_polls.get(tp, 0) > _POLLS_OF_A_HOLE}
