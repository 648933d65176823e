"""Whole batches, by number, out of the records of polar.batches.v1.

Invariants: batches come in order of their numbers without a gap; of several manifests with
one number the first on the log counts, of several rows with one index likewise; a batch is
handed out when it has all its rows and their digest is the manifest's.
"""

import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field

from polar.core.stage import Partition
from polar.errors import LogUnavailableError, TrainerError
from polar.kafka.reader import end_offsets, follow
from polar.settings import LogSettings
from schemas.base import Event, digest_of
from schemas.batches import BatchManifest, PackedRow
from schemas.topics import BATCHES

logger = logging.getLogger(__name__)

_MAX_AHEAD = 64
"""Batches begun beyond the one that is waited for; the packer writes one after the other."""
_PARTITION = Partition(BATCHES.suffix, 0)


@dataclass(frozen=True, slots=True)
class Batch:
    """A manifest with all its rows, in order of their index."""

    manifest: BatchManifest
    rows: tuple[PackedRow, ...]
    offset: int | None = None
    """Of the manifest on the log; none outside a log."""


@dataclass(slots=True)
class _Begun:
    manifest: BatchManifest
    offset: int | None
    rows: dict[int, PackedRow] = field(default_factory=dict)


class BatchAssembler:
    """Puts batches of one policy together from records in log order. Pure."""

    def __init__(self, policy: str, next_number: int) -> None:
        self.ignored = 0
        """Duplicates, rows without a manifest, and batches before `next_number`."""
        self._policy = policy
        self._next = next_number
        self._begun: dict[int, _Begun] = {}

    def add(self, event: Event, offset: int | None = None) -> None:
        """Take one record. Raises TrainerError when too many batches wait for an earlier one."""
        if not isinstance(event, (BatchManifest, PackedRow)) or event.policy != self._policy:
            return
        if isinstance(event, BatchManifest):
            if event.number < self._next or event.number in self._begun:
                self.ignored += 1
                return
            self._begun[event.number] = _Begun(event, offset)
            if len(self._begun) > _MAX_AHEAD:
                raise TrainerError(
                    f"batch {self._next} of policy {self._policy} is incomplete while "
                    f"{len(self._begun) - 1} later ones are on the log; is the packer running?"
                )
            return
        begun = self._begun.get(event.batch_number)
        if begun is None or event.index in begun.rows or not 0 <= event.index < begun.manifest.row_count:
            self.ignored += 1
            return
        begun.rows[event.index] = event

    def take(self) -> Batch | None:
        """The next batch once it is complete. Raises TrainerError when its rows are not the
        ones that the manifest decided on."""
        begun = self._begun.get(self._next)
        if begun is None or len(begun.rows) < begun.manifest.row_count:
            return None
        rows = tuple(begun.rows[index] for index in range(begun.manifest.row_count))
        found = digest_of(*rows)
        if found != begun.manifest.rows_digest:
            raise TrainerError(
                f"batch {self._next}: its rows have digest {found}, the manifest says "
                f"{begun.manifest.rows_digest}; the log holds rows of another packing"
            )
        del self._begun[self._next]
        self._next += 1
        return Batch(begun.manifest, rows, begun.offset)


def batches_from_events(
    events: Iterable[Event], *, policy: str = "policy", first_number: int = 0
) -> Iterator[tuple[BatchManifest, tuple[PackedRow, ...]]]:
    """Manifest and rows of each whole batch in recorded events, in log order (an archive)."""
    assembler = BatchAssembler(policy, first_number)
    for event in events:
        assembler.add(event)
        while batch := assembler.take():
            yield batch.manifest, batch.rows


async def follow_batches(
    log: LogSettings, policy: str, *, next_number: int, last_manifest_offset: int | None = None
) -> AsyncGenerator[Batch, None]:
    """Batches from `next_number` on as they become complete, for ever.

    `last_manifest_offset`: where the manifest of batch `next_number - 1` stood. Reading starts
    there if it still does; on a log where it does not (a copy, a new topic), at the beginning.
    """
    start = await _first_offset(log, policy, next_number - 1, last_manifest_offset)
    assembler = BatchAssembler(policy, next_number)
    async with contextlib.aclosing(follow(log, BATCHES, start={_PARTITION: start})) as records:
        async for record in records:
            assembler.add(record.event, record.offset)
            while batch := assembler.take():
                yield batch


async def _first_offset(log: LogSettings, policy: str, number: int, offset: int | None) -> int:
    """`offset` if the manifest of batch `number` stands there, else 0."""
    try:
        if offset is None or (await end_offsets(log, BATCHES)).get(_PARTITION, 0) <= offset:
            return 0
    except LogUnavailableError:
        return 0  # a hint is not worth waiting for
    async with contextlib.aclosing(follow(log, BATCHES, start={_PARTITION: offset})) as records:
        record = await anext(records)
    event = record.event
    if isinstance(event, BatchManifest) and (event.policy, event.number) == (policy, number):
        return offset
    logger.warning(
        "batch %d of policy %s is not at offset %d any more, reading from 0", number, policy, offset
    )
    return 0
