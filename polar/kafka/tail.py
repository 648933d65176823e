"""How a consumer reads towards the end of a partition, on any broker.

Two facts of the embedded broker stand behind this:
- A fetch is answered with what could be read within its longest wait; listing the stored batches
  takes most of it. At 20 ms a catch-up crawls (30 records/s, measured); at 500 ms it runs at the
  speed of the store. Near the end a short wait keeps the latency low.
- A broker killed between taking an offset and storing the batch leaves a *hole* there. When the
  hole is the last offset of a partition, its high watermark lies beyond the last record for good:
  a reader that waits for it would wait for ever.
"""

from collections.abc import Collection
from typing import Any

from aiokafka import TopicPartition

CATCH_UP_WAIT_MS = 500
_POLLS_OF_A_HOLE = 3
"""Empty answers below the high watermark, with nothing from elsewhere, that make a hole."""


def set_fetch_wait(consumer: Any, milliseconds: int) -> None:
    """The longest wait of this consumer's next fetches. aiokafka only knows it at construction."""
    consumer._fetcher._fetch_max_wait_ms = milliseconds  # noqa: SLF001


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
