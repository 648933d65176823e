"""PackedRow → tensors: the only place where wire columns become tensors.

Invariant: a row that reaches the model is consistent (offsets inside the row, ids inside the
vocabulary, finite numbers where a token is trained); anything else is a TrainerError that
names batch and row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polar.errors import TrainerError
from schemas.batches import PackedRow
from schemas.columns import FloatColumn, TokenColumn
from schemas.policies import PolicyVersion


@dataclass(frozen=True, slots=True)
class RowTensors:
    """A row of t tokens in s sequences with n trained occurrences."""

    tokens: Tensor
    """[1, t] int64."""
    positions: Tensor
    """[1, t] int64."""
    sequence_starts: Tensor
    """[s + 1] int32."""
    sources: Tensor
    """[n] int64 row offset whose hidden state predicts the target."""
    targets: Tensor
    """[n] int64."""
    engine_logprobs: Tensor
    """[n] float32."""
    temperatures: Tensor
    """[n] float32."""
    weights: Tensor
    """[n] float32."""
    advantages: Tensor
    """[n] float32."""
    current: Tensor
    """[n] bool: the whole version interval of the call is the trainer's version."""


def row_tensors(
    row: PackedRow, *, vocab_size: int, device: torch.device, version: PolicyVersion | None
) -> RowTensors:
    """Tensors of a row on `device`; `version` is the trainer's before the step."""
    _check(row, vocab_size)
    current = np.array(
        [first == last == version for first, last in zip(row.first_versions, row.last_versions, strict=True)],
        dtype=bool,
    )
    occurrence_current = current[_ints(row.call_ordinals)] if len(row.call_ids) else np.zeros(0, dtype=bool)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return RowTensors(
        tokens=tensor(_ints(row.tokens)[None]),
        positions=tensor(_ints(row.positions)[None]),
        sequence_starts=tensor(_ints(row.sequence_starts).astype(np.int32)),
        sources=tensor(_ints(row.sources)),
        targets=tensor(_ints(row.targets)),
        engine_logprobs=tensor(_floats(row.engine_logprobs)),
        temperatures=tensor(_floats(row.temperatures)),
        weights=tensor(_floats(row.weights)),
        advantages=tensor(_floats(row.advantages)),
        current=tensor(occurrence_current),
    )


def _ints(column: TokenColumn) -> np.ndarray:
    return np.frombuffer(column.data, "<i4").astype(np.int64)


def _floats(column: FloatColumn) -> np.ndarray:
    return np.frombuffer(column.data, "<f4").astype(np.float32)


def _check(row: PackedRow, vocab_size: int) -> None:
    starts, sources = _ints(row.sequence_starts), _ints(row.sources)
    ids = np.concatenate([_ints(row.tokens), _ints(row.targets)])
    is_known = (ids >= 0) & (ids < vocab_size)
    ordinals, weights = _ints(row.call_ordinals), _floats(row.weights)
    trained = weights > 0
    problems = {
        "no tokens": len(row.tokens) == 0,
        "sequence_starts do not cut the whole row": len(starts) < 2
        or starts[0] != 0
        or starts[-1] != len(row.tokens)
        or bool((np.diff(starts) <= 0).any()),
        "a source lies outside the row": bool(((sources < 0) | (sources >= len(row.tokens))).any()),
        f"a token id is outside the vocabulary of {vocab_size}": not bool(is_known.all()),
        "a call ordinal has no call": bool(((ordinals < 0) | (ordinals >= len(row.call_ids))).any()),
        "a weight is negative or not finite": not bool((np.isfinite(weights) & (weights >= 0)).all()),
        "a trained token has no finite log-prob or advantage": not bool(
            np.isfinite(_floats(row.engine_logprobs)[trained]).all()
            and np.isfinite(_floats(row.advantages)[trained]).all()
        ),
        "a temperature is not above 0": not bool((_floats(row.temperatures) > 0).all()),
    }
    found = [name for name, wrong in problems.items() if wrong]
    if found:
        raise TrainerError(f"batch {row.batch_number} row {row.index}: {'; '.join(found)}")
