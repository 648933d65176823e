"""The branches of a PackedRow: which row offsets a token attends to."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.batches import PackedRow
from schemas.columns import TokenColumn

Ints = npt.NDArray[np.int64]


def ints(column: TokenColumn) -> Ints:
    """[n] int64 copy of a column."""
    return np.frombuffer(column.data, "<i4").astype(np.int64)


@dataclass(frozen=True, slots=True)
class RowBranches:
    """s segments with r ancestor ranges."""

    starts: Ints
    """[s + 1] row offsets of the segments."""
    splits: Ints
    """[s + 1] where the ranges of each segment begin in `ranges`."""
    ranges: Ints
    """[r, 2] row offsets [start, end)."""

    @staticmethod
    def of(row: PackedRow) -> "RowBranches":
        """The branches of a row whose columns are consistent."""
        ranges = np.stack([ints(row.range_starts), ints(row.range_ends)], axis=1)
        return RowBranches(ints(row.segment_starts), np.cumsum([0, *row.range_counts]), ranges)

    def segment_of(self, offsets: Ints) -> Ints:
        """[n] segment in which each row offset [n] lies."""
        found: Ints = np.searchsorted(self.starts, offsets, side="right") - 1
        return found

    def ancestors(self, segment: int) -> Ints:
        """[ranges, 2] of a segment, from the root down."""
        return self.ranges[self.splits[segment] : self.splits[segment + 1]]

    def path(self, segment: int) -> Ints:
        """[depth of its last token + 1] row offsets of a segment's whole branch."""
        own = self.starts[segment : segment + 2]
        return np.concatenate([np.arange(*piece) for piece in (*self.ancestors(segment), own)])

    def is_branch(self, segment: int) -> bool:
        """Whether a segment's ancestors are the whole path down to a token of an earlier segment."""
        above = self.ancestors(segment)
        if not len(above):
            return True
        parent = int(self.segment_of(above[-1:, 1] - 1)[0])
        whole = [*self.ancestors(parent).tolist(), [int(self.starts[parent]), int(above[-1, 1])]]
        return bool(above.tolist() == whole)
