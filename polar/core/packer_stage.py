"""The packer: ScoredGroups in order of arrival → BatchManifest, then its PackedRows.

The decision is the manifest. The stage writes it alone, reads it back, obeys the first one of a
number by offset, and only then writes the rows: rows of a manifest that lost never reach the
log, and a manifest without all its rows (a crash in between) is completed from its own group
ids. The manifest's header `positions` holds, per partition, the offset of the next GroupSealed
whose group is not in a batch yet: ScoredGroups below it are duplicates.

Bounds: one batch at a time is under way; the pool is what the log holds above the positions
(`groups_per_batch` fresh groups are always taken at once, stale ones leave with them).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from polar.core.batch_metrics import prefixed
from polar.core.batching import BatchMismatchError, BatchRule, choose, make_batch, rebuild_batch
from polar.core.grouper_stage import SEAL_OFFSET, SEAL_PARTITION
from polar.core.metrics import Metrics
from polar.core.open_keys import OpenKeys
from polar.core.stage import DeadLettered, Emit, LogRecord, Output, Partition
from polar.core.staleness import PolicyLineages
from schemas.batches import BatchManifest, PackedRow
from schemas.groups import ScoredGroup
from schemas.policies import PolicyPublished
from schemas.topics import BATCHES, POLICIES

POSITIONS = "positions"
"""Header of a BatchManifest: JSON, partition → next GroupSealed offset."""
ALGORITHM_HEADER = "algorithm"

_BATCHES = Partition(BATCHES.suffix, 0)
_POLICIES = Partition(POLICIES.suffix, 0)


@dataclass(slots=True)
class _Batch:
    """A batch whose manifest is on the log and whose rows are not all there yet."""

    manifest: BatchManifest
    record: LogRecord
    """The manifest's."""
    groups: dict[str, ScoredGroup] = field(default_factory=dict)
    rows: list[PackedRow] | None = None
    """Its rows, where this process made the manifest."""
    rows_there: set[int] = field(default_factory=set)
    is_written: bool = False
    """Its rows were handed out for writing since the last start."""

    @property
    def is_complete(self) -> bool:
        return len(self.rows_there) == self.manifest.row_count

    @property
    def has_groups(self) -> bool:
        return all(group_id in self.groups for group_id in self.manifest.groups)


class PackerCore:
    """StageCore over polar.groups.v1, polar.batches.v1 (its own output) and polar.policies.v1."""

    def __init__(self, rule: BatchRule | None = None, *, max_pool: int = 100_000) -> None:
        """`max_pool`: groups that may be held; more of them stop the stage with an error."""
        self._rule = rule or BatchRule()
        self._lineages = PolicyLineages()
        self._keys = OpenKeys(max_pool)
        """Groups that are in the pool or in an incomplete batch."""
        self._pool: dict[str, tuple[ScoredGroup, int, int]] = {}
        """Group id → (group, seal partition, seal offset), in order of arrival."""
        self._positions: dict[int, int] = {}
        self._arrived: dict[int, int] = {}
        """Partition → highest seal offset that arrived."""
        self._batches: dict[int, _Batch] = {}
        """Incomplete batches by number."""
        self._next_number = 0
        self._assigned: set[Partition] = set()
        self._asked: tuple[BatchManifest, list[PackedRow]] | None = None
        """The batch whose manifest was written and is not read back yet."""
        self._last_complete: int | None = None
        """Offset of the manifest of the last complete batch."""
        self._newest: BatchManifest | None = None
        self._counts = dict.fromkeys(
            (
                "batches", "rows_written", "duplicates", "other_policy", "stale_groups",
                "ignored_manifests", "batches_not_completed",
            ),
            0,
        )  # fmt: skip

    # -- StageCore ----------------------------------------------------------------------

    def on_assigned(self, ends: Mapping[Partition, tuple[int, int]]) -> None:
        """Start reading these partitions."""
        self._assigned |= set(ends)
        self._keys.assigned(ends)

    def on_revoked(self, partitions: Iterable[Partition]) -> None:
        """Forget what was read from these partitions."""
        gone = set(partitions)
        self._assigned -= gone
        for group_id in self._keys.revoked(gone):
            self._pool.pop(group_id, None)
        for partition in gone:
            self._arrived.pop(partition.number, None)
        if _BATCHES in gone:
            self._batches.clear()
            self._positions.clear()
            self._next_number, self._asked, self._last_complete = 0, None, None

    def on_record(self, record: LogRecord, now: float) -> list[Output]:
        """Take one record; decide or write rows where it completes something."""
        del now
        event = record.event
        outputs: list[Output] = []
        if isinstance(event, PolicyPublished):
            if event.policy == self._rule.policy:
                self._lineages.add(event)
        elif isinstance(event, ScoredGroup):
            outputs += self._take_group(record, event)
        elif isinstance(event, BatchManifest) and event.policy == self._rule.policy:
            self._take_manifest(record, event)
        elif isinstance(event, PackedRow) and event.policy == self._rule.policy:
            self._take_row(event)
        self._keys.seen(record)
        return outputs + self._advance()

    def on_caught_up(self, partition: Partition, now: float) -> list[Output]:
        """Own batches, or the versions, were read back: decisions may follow."""
        del partition, now
        return self._advance()

    def on_tick(self, now: float) -> list[Output]:
        """Time decides nothing here."""
        del now
        return []

    def commit_offsets(self) -> Mapping[Partition, int]:
        """Batches: the last complete manifest. Groups: the first that is not in a complete batch."""
        offsets = self._keys.commit_offsets()
        held = [batch.record.offset for batch in self._batches.values()]
        if self._last_complete is not None:
            held.append(self._last_complete)
        if held and _BATCHES in offsets:
            offsets[_BATCHES] = min(held)
        return offsets

    def metrics(self) -> Metrics:
        """Groups in the pool, incomplete batches, what the newest manifest says of its batch
        (`batch_…`), and counters since the start."""
        return {
            **prefixed("batch", self._newest.metrics if self._newest is not None else {}),
            "pool_groups": len(self._pool),
            "incomplete_batches": len(self._batches),
            "next_batch": self._next_number,
            **self._counts,
        }

    # -- records ------------------------------------------------------------------------

    def _take_group(self, record: LogRecord, group: ScoredGroup) -> list[Output]:
        if group.policy != self._rule.policy:
            self._counts["other_policy"] += 1
            return []
        seal = _seal_of(record)
        if seal is None:
            return [
                DeadLettered(record, "no_seal_headers", f"{SEAL_PARTITION} and {SEAL_OFFSET} are missing")
            ]
        number, offset = seal
        if offset <= self._arrived.get(number, -1):
            self._counts["duplicates"] += 1
            return []
        self._arrived[number] = offset
        owner = self._batch_of(group.group_id)
        if owner is not None:
            owner.groups[group.group_id] = group
            self._keys.open(group.group_id, record)
        elif offset < self._positions.get(number, 0):
            self._counts["duplicates"] += 1
        else:
            self._pool[group.group_id] = (group, number, offset)
            self._keys.open(group.group_id, record)
        return []

    def _take_manifest(self, record: LogRecord, manifest: BatchManifest) -> None:
        is_first = self._last_complete is None and not self._batches
        if not is_first and manifest.number != self._next_number:
            self._counts["ignored_manifests"] += 1
            return
        batch = _Batch(manifest, record)
        if self._asked is not None and self._asked[0] == manifest:
            batch.rows = self._asked[1]
        self._asked = None
        self._next_number = manifest.number + 1
        self._newest = manifest
        self._batches[manifest.number] = batch
        for group_id in manifest.groups:
            if group_id in self._pool:
                batch.groups[group_id] = self._pool.pop(group_id)[0]
        positions = json.loads(record.headers.get(POSITIONS, "{}"))
        self._positions |= {int(number): int(offset) for number, offset in positions.items()}
        for group_id, (_, number, offset) in list(self._pool.items()):
            if offset < self._positions.get(number, 0):
                del self._pool[group_id]
                self._keys.close(group_id)
        self._counts["stale_groups"] += len(manifest.excluded)
        self._finish_complete()

    def _take_row(self, row: PackedRow) -> None:
        batch = self._batches.get(row.batch_number)
        if batch is not None and row.index < batch.manifest.row_count:
            batch.rows_there.add(row.index)
            self._finish_complete()

    def _finish_complete(self) -> None:
        for number in sorted(self._batches):
            batch = self._batches[number]
            if not batch.is_complete:
                break
            del self._batches[number]
            self._last_complete = batch.record.offset
            self._counts["batches"] += 1
            for group_id in batch.manifest.groups:
                self._keys.close(group_id)

    def _batch_of(self, group_id: str) -> _Batch | None:
        return next((b for b in self._batches.values() if group_id in b.manifest.groups), None)

    # -- decisions ----------------------------------------------------------------------

    def _advance(self) -> list[Output]:
        """Write the rows that are owed; when nothing is under way, decide the next batch."""
        if not self._has_read(_BATCHES):
            return []
        outputs: list[Output] = []
        for batch in self._batches.values():
            if not batch.is_written and batch.has_groups:
                batch.is_written = True
                outputs += self._owed_rows(batch)
        if not self._batches and self._asked is None and self._has_read(_POLICIES):
            outputs += self._decide()
        return outputs

    def _owed_rows(self, batch: _Batch) -> list[Output]:
        """The rows of a manifest that are not on the log."""
        try:
            rows = batch.rows or rebuild_batch(batch.manifest, batch.groups)
        except BatchMismatchError as error:
            # Only the version that made the manifest can complete it. Until it does, nothing may
            # follow: trainers take batches by number.
            self._counts["batches_not_completed"] += 1
            return [DeadLettered(batch.record, "batch_mismatch", str(error))]
        owed = [row for row in rows if row.index not in batch.rows_there]
        self._counts["rows_written"] += len(owed)
        return [Emit(row) for row in owed]

    def _has_read(self, partition: Partition) -> bool:
        """Whether all that lay in the partition at its assignment was processed."""
        return partition in self._assigned and self._keys.is_caught_up(partition)

    def _decide(self) -> list[Output]:
        if len(self._pool) < self._rule.groups_per_batch:
            return []
        choice = choose((group for group, _, _ in self._pool.values()), self._rule, self._lineages)
        if choice is None:
            return []
        self._asked = make_batch(self._next_number, choice, self._rule, self._lineages.newest)
        manifest, _ = self._asked
        positions = dict(self._positions)
        for group in (*choice.taken, *(group for group, _ in choice.excluded)):
            _, number, offset = self._pool[group.group_id]
            positions[number] = max(positions.get(number, 0), offset + 1)
        headers = {
            POSITIONS: json.dumps({str(number): positions[number] for number in sorted(positions)}),
            ALGORITHM_HEADER: manifest.algorithm,
        }
        return [Emit(manifest, headers)]


def _seal_of(record: LogRecord) -> tuple[int, int] | None:
    """Coordinates of the GroupSealed that a ScoredGroup follows from."""
    try:
        return int(record.headers[SEAL_PARTITION]), int(record.headers[SEAL_OFFSET])
    except (KeyError, ValueError):
        return None
