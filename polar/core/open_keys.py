"""Which keys are open, and how far a stage may commit because of them.

A key (session, group) is opened by a record and closed by a decision. Everything that the key
needs from the log lies at or above the offsets noted here, so a stage that commits
`commit_offsets()` finds all of it again after a restart.

Invariants: a committed offset never passes the opening record, nor any held record, of an open
key; it never passes the next unread record; memory is proportional to the keys that are open,
however long the oldest of them stays open.

The *catch-up zone* of a partition are the records between its committed offset and its end at
the moment of assignment: a key that is unknown there may have been closed before the restart.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping

from polar.core.stage import LogRecord, Partition

_SLACK = 64
"""Stale heap entries that are tolerated before a heap is rebuilt."""


class TooManyOpenKeysError(ValueError):
    """The table is full; the core must close a key (`oldest`) before it opens another."""


class OpenKeys:
    """Open keys → the first offset that each still needs, per partition."""

    def __init__(self, max_open: int) -> None:
        """`max_open`: keys that may be open at once."""
        if max_open < 1:
            raise ValueError(f"max_open must be at least 1, not {max_open}")
        self.max_open = max_open
        self._opened_in: dict[str, Partition] = {}
        """Open key → partition of its opening record, in order of opening."""
        self._needs: dict[str, dict[Partition, int]] = {}
        """Key → first needed offset per partition; held keys that are not open are here too."""
        self._heaps: dict[Partition, list[tuple[int, str]]] = {}
        """Needs of each partition by offset, with stale entries that are skipped when met."""
        self._live: dict[Partition, int] = {}
        """Number of entries of `_needs` per partition."""
        self._next: dict[Partition, int] = {}
        self._zone_end: dict[Partition, int] = {}

    # -- assignment ---------------------------------------------------------------------

    def assigned(self, ends: Mapping[Partition, tuple[int, int]]) -> None:
        """Partitions came: partition → (first offset to be read, end offset now)."""
        for partition, (first, end) in ends.items():
            self._next[partition] = first
            self._zone_end[partition] = end

    def revoked(self, partitions: Iterable[Partition]) -> list[str]:
        """Partitions went. Closes and returns the keys that were opened in one of them, in order
        of opening; other keys lose their holds there."""
        gone = set(partitions)
        lost = [key for key, partition in self._opened_in.items() if partition in gone]
        for key in lost:
            self.close(key)
        for key in [key for key, needs in self._needs.items() if not gone.isdisjoint(needs)]:
            self._forget(key, gone)
        for partition in gone:
            self._next.pop(partition, None)
            self._zone_end.pop(partition, None)
            self._heaps.pop(partition, None)
            self._live.pop(partition, None)
        return lost

    # -- keys ---------------------------------------------------------------------------

    def open(self, key: str, record: LogRecord) -> bool:
        """Open a key by its opening record; False when it is open already (the first wins).

        Raises TooManyOpenKeysError when `max_open` keys are open.
        """
        if key in self._opened_in:
            return False
        if self.is_full:
            raise TooManyOpenKeysError(f"{self.max_open} keys are open, {key!r} is one too many")
        self._opened_in[key] = record.partition
        self.hold(key, record.partition, record.offset)
        return True

    def hold(self, key: str, partition: Partition, offset: int) -> None:
        """The key needs the records of this partition from `offset` on, until it is closed.

        A key that is not open (a record that waits for its opening) may hold as well.
        """
        needs = self._needs.setdefault(key, {})
        held = needs.get(partition)
        if held is not None and held <= offset:
            return
        needs[partition] = offset
        if held is None:
            self._live[partition] = self._live.get(partition, 0) + 1
        heap = self._heaps.setdefault(partition, [])
        heapq.heappush(heap, (offset, key))
        if len(heap) > 2 * self._live[partition] + _SLACK:
            self._heaps[partition] = self._rebuilt(partition)

    def close(self, key: str) -> bool:
        """The key needs nothing any more. True when it was open."""
        was_open = self._opened_in.pop(key, None) is not None
        self._forget(key, set(self._needs.get(key, ())))
        return was_open

    def is_open(self, key: str) -> bool:
        """Whether the key was opened and not closed yet."""
        return key in self._opened_in

    @property
    def is_full(self) -> bool:
        """Whether another `open` would raise."""
        return len(self._opened_in) >= self.max_open

    def oldest(self) -> str | None:
        """The key that was opened first, or None."""
        return next(iter(self._opened_in), None)

    def __len__(self) -> int:
        """Number of open keys."""
        return len(self._opened_in)

    def __iter__(self) -> Iterator[str]:
        """Open keys in order of opening."""
        return iter(self._opened_in)

    # -- positions ----------------------------------------------------------------------

    def seen(self, record: LogRecord) -> None:
        """The record was processed. Records of one partition come in offset order."""
        following = record.offset + 1
        if following > self._next.get(record.partition, 0):
            self._next[record.partition] = following

    def in_catch_up_zone(self, record: LogRecord) -> bool:
        """Whether the record was on the log when its partition was assigned."""
        return record.offset < self._zone_end.get(record.partition, 0)

    def is_caught_up(self, partition: Partition) -> bool:
        """Whether every record of the catch-up zone was processed."""
        return self._next.get(partition, 0) >= self._zone_end.get(partition, 0)

    def commit_offsets(self) -> dict[Partition, int]:
        """Per assigned or seen partition: the lowest offset that an open or held key needs,
        else the next one to read."""
        return {partition: self._commit_offset(partition) for partition in self._next}

    def _commit_offset(self, partition: Partition) -> int:
        following = self._next[partition]
        heap = self._heaps.get(partition, [])
        while heap:
            offset, key = heap[0]
            if self._needs.get(key, {}).get(partition) == offset:
                return min(offset, following)
            heapq.heappop(heap)
        return following

    def _forget(self, key: str, partitions: Iterable[Partition]) -> None:
        needs = self._needs.get(key)
        if needs is None:
            return
        for partition in partitions:
            if needs.pop(partition, None) is not None:
                self._live[partition] -= 1
        if not needs:
            del self._needs[key]

    def _rebuilt(self, partition: Partition) -> list[tuple[int, str]]:
        heap = [(needs[partition], key) for key, needs in self._needs.items() if partition in needs]
        heapq.heapify(heap)
        return heap
