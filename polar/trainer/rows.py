"""PackedRows → causal sequences with their trained occurrences, as arrays.

Invariant: what leaves this module is consistent (offsets inside a sequence, ids inside the
vocabulary, finite numbers where a token is trained); a row that is not is a TrainerError that
names batch and row.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polar.errors import TrainerError
from schemas.batches import PackedRow
from schemas.columns import FloatColumn, TokenColumn
from schemas.policies import PolicyVersion

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TrainedSequence:
    """One causal sequence with n trained occurrences."""

    tokens: Ints
    """[length] ids; a token's position is its index."""
    sources: Ints
    """[n] index of the token after which the target was sampled."""
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
) -> tuple[list[TrainedSequence], Occurrences]:
    """Sequences that train something, and the occurrences they name.

    `version` is the trainer's before the step. Raises TrainerError.
    """
    sequences: list[TrainedSequence] = []
    columns: list[tuple[npt.NDArray[np.generic], ...]] = []
    seen = 0
    for row in rows:
        _check(row, vocab_size)
        tokens, sources, starts = _ints(row.tokens), _ints(row.sources), _ints(row.sequence_starts)
        for start, end in itertools.pairwise(starts):
            inside = np.flatnonzero((sources >= start) & (sources < end))
            if len(inside):
                sequences.append(TrainedSequence(tokens[start:end], sources[inside] - start, seen + inside))
        seen += len(sources)
        columns.append(
            (
                _ints(row.targets),
                _floats(row.engine_logprobs),
                _floats(row.temperatures),
                _floats(row.weights),
                _floats(row.advantages),
                _is_current(row, version),
            )
        )
    return sequences, Occurrences(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))


def _is_current(row: PackedRow, version: PolicyVersion | None) -> npt.NDArray[np.bool_]:
    intervals = zip(row.first_versions, row.last_versions, strict=True)
    of_call = np.array([first == last == version for first, last in intervals], dtype=np.bool_)
    return of_call[_ints(row.call_ordinals)]


def _ints(column: TokenColumn) -> Ints:
    return np.frombuffer(column.data, "<i4").astype(np.int64)


def _floats(column: FloatColumn) -> Floats:
    return np.frombuffer(column.data, "<f4").astype(np.float32)


def _cuts(starts: Ints, length: int) -> bool:
    """The offsets cut the whole row into sequences that are not empty."""
    return len(starts) > 1 and starts[0] == 0 and starts[-1] == length and bool((np.diff(starts) > 0).all())


def _counted(starts: Ints) -> Ints:
    """Positions from 0 in each sequence."""
    return np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))


def _check(row: PackedRow, vocab_size: int) -> None:
    starts, sources, tokens = _ints(row.sequence_starts), _ints(row.sources), _ints(row.tokens)
    ids = np.concatenate([tokens, _ints(row.targets)])
    ordinals, weights = _ints(row.call_ordinals), _floats(row.weights)
    trained = weights > 0
    is_cut = _cuts(starts, len(tokens))
    problems = {
        "sequence_starts do not cut the whole row": not is_cut,
        "positions do not count from 0 in each sequence": is_cut
        and not np.array_equal(_ints(row.positions), _counted(starts)),
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
