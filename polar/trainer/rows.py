"""PackedRows → branches with their trained occurrences, as arrays.

Invariant: what leaves this module is consistent (offsets inside a branch, ids inside the
vocabulary, finite numbers where a token is trained); a row that is not is a TrainerError that
names batch and row.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polar.core.row_reading import Ints, RowBranches, ints
from polar.errors import TrainerError
from schemas.batches import PackedRow
from schemas.columns import FloatColumn
from schemas.policies import PolicyVersion

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Branch:
    """One segment of a row, with n trained occurrences that are predicted in it."""

    tokens: Ints
    """[length] ids of the segment itself."""
    parent: int
    """Index of the branch that it leaves, in the list that it stands in; -1 for a root."""
    depth: int
    """Tokens above it, all of them on the parent's branch."""
    sources: Ints
    """[n] tokens before and including the one after which each target was sampled; above `depth`."""
    occurrences: Ints
    """[n] rows of `Occurrences`."""


@dataclass(frozen=True, slots=True)
class Occurrences:
    """All n trained occurrences of some rows, in the order of the rows."""

    targets: Ints
    """[n]."""
    engine_logprobs: Floats
    """[n]."""
    temperatures: Floats
    """[n]."""
    weights: Floats
    """[n]."""
    advantages: Floats
    """[n]."""
    is_current: npt.NDArray[np.bool_]
    """[n] the whole version interval of the call is the trainer's version."""


def read_rows(
    rows: Sequence[PackedRow], *, vocab_size: int, version: PolicyVersion | None
) -> tuple[list[Branch], Occurrences]:
    """The branches of all rows, a parent before its children, and the occurrences they name.

    `version` is the trainer's before the step. Raises TrainerError.
    """
    branches: list[Branch] = []
    columns: list[tuple[npt.NDArray[np.generic], ...]] = []
    seen = 0
    for row in rows:
        _check(row, vocab_size)
        branches += _branches(row, first_branch=len(branches), first_occurrence=seen)
        seen += len(row.sources)
        columns.append(
            (
                ints(row.targets),
                _floats(row.engine_logprobs),
                _floats(row.temperatures),
                _floats(row.weights),
                _floats(row.advantages),
                _is_current(row, version),
            )
        )
    return branches, Occurrences(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))


def _branches(row: PackedRow, *, first_branch: int, first_occurrence: int) -> list[Branch]:
    of_row = RowBranches.of(row)
    tokens, sources, positions = ints(row.tokens), ints(row.sources), ints(row.positions)
    segments = of_row.segment_of(sources)
    order = np.argsort(segments, kind="stable")
    splits = np.searchsorted(segments[order], np.arange(len(of_row.starts)))
    branches = []
    for segment, (start, end) in enumerate(itertools.pairwise(of_row.starts.tolist())):
        above = of_row.ancestors(segment)
        inside = order[splits[segment] : splits[segment + 1]]
        branches.append(
            Branch(
                tokens=tokens[start:end],
                parent=first_branch + int(of_row.segment_of(above[-1:, 1] - 1)[0]) if len(above) else -1,
                depth=int(positions[start]),
                sources=positions[sources[inside]] + 1,
                occurrences=first_occurrence + inside,
            )
        )
    return branches


def _is_current(row: PackedRow, version: PolicyVersion | None) -> npt.NDArray[np.bool_]:
    intervals = zip(row.first_versions, row.last_versions, strict=True)
    of_call = np.array([first == last == version for first, last in intervals], dtype=np.bool_)
    return of_call[ints(row.call_ordinals)]


def _floats(column: FloatColumn) -> Floats:
    return np.frombuffer(column.data, "<f4").astype(np.float32)


def _check(row: PackedRow, vocab_size: int) -> None:
    sources, tokens = ints(row.sources), ints(row.tokens)
    ids = np.concatenate([tokens, ints(row.targets)])
    ordinals, weights = ints(row.call_ordinals), _floats(row.weights)
    trained = weights > 0
    problems = {
        **_wrong_branches(row),
        "a source lies outside the row": not ((sources >= 0) & (sources < len(tokens))).all(),
        f"a token id is outside the vocabulary of {vocab_size}": not ((ids >= 0) & (ids < vocab_size)).all(),
        "a call ordinal has no call": not ((ordinals >= 0) & (ordinals < len(row.call_ids))).all(),
        "a weight is negative or not finite": not (np.isfinite(weights) & (weights >= 0)).all(),
        "a trained token has no finite log-prob": not np.isfinite(
            _floats(row.engine_logprobs)[trained]
        ).all(),
        "a trained token has no finite advantage": not np.isfinite(_floats(row.advantages)[trained]).all(),
        "a temperature is not above 0": not (_floats(row.temperatures) > 0).all(),
    }
    found = [name for name, is_wrong in problems.items() if is_wrong]
    if found:
        raise TrainerError(f"batch {row.batch_number} row {row.index}: {'; '.join(found)}")


def _wrong_branches(row: PackedRow) -> dict[str, bool]:
    """What can be wrong with segments and ancestors; later points presume the earlier ones."""
    starts, counts = ints(row.segment_starts), ints(row.range_counts)
    size = len(row.tokens)
    if not (len(starts) > 1 and starts[0] == 0 and starts[-1] == size and (np.diff(starts) > 0).all()):
        return {"segment_starts do not cut the whole row": True}
    begins, ends = ints(row.range_starts), ints(row.range_ends)
    if not ((counts >= 0).all() and counts.sum() == len(begins) == len(ends)):
        return {"range_counts do not add up to the ancestor ranges": True}
    if not ((begins >= 0) & (begins < ends) & (ends <= np.repeat(starts[:-1], counts))).all():
        return {"an ancestor range is empty or does not lie before its segment": True}
    of_row, positions = RowBranches.of(row), ints(row.positions)
    above = np.concatenate([[0], np.cumsum(ends - begins)])[of_row.splits]
    counted = np.arange(size) - np.repeat(starts[:-1] - np.diff(above), np.diff(starts))
    if not np.array_equal(positions, counted):
        return {"positions do not count on from each segment's ancestors": True}
    return {"ancestor ranges are not one branch": not all(map(of_row.is_branch, range(len(counts))))}
