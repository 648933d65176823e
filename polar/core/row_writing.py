"""Laid out trees and the calls that are trained in them → one PackedRow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from polar.core.prefix_tree import Tokens, as_column
from polar.core.tree_layout import Ints, Layout
from schemas.batches import PackedRow
from schemas.columns import FloatColumn, TokenColumn
from schemas.trees import StitchedCall

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowCall:
    """A call with its n trained occurrences."""

    call: StitchedCall
    indexes: Tokens
    """[n] indexes into its completion."""
    sources: Ints
    """[n] offsets in the piece at which they are predicted."""
    targets: Tokens
    """[n] token ids."""
    weight: float
    """Share of each of them in the loss."""
    advantage: float


@dataclass(frozen=True, slots=True)
class RowPiece:
    """A tree, or branches of it, and the calls that are trained there."""

    layout: Layout
    calls: list[RowCall]


@dataclass(frozen=True, slots=True)
class WrittenRow:
    """A row and its work."""

    row: PackedRow
    pairs: int
    """Pairs of a token and a token that it attends to, itself included."""


def write_row(pieces: Sequence[RowPiece], *, policy: str, batch_number: int) -> WrittenRow:
    """The row of these pieces, in this order; its index is 0."""
    layouts = [piece.layout for piece in pieces]
    begins = np.cumsum([0, *(len(layout.tokens) for layout in layouts)], dtype=np.int64)
    positions = np.concatenate([layout.positions for layout in layouts])
    starts = np.concatenate(
        [np.array(layout.segment_starts[:-1]) + begin for layout, begin in zip(layouts, begins, strict=False)]
    )
    ranges = [
        np.array([piece for above in layout.ancestors for piece in above], dtype=np.int64).reshape(-1, 2)
        + begin
        for layout, begin in zip(layouts, begins, strict=False)
    ]
    bounds = np.concatenate(ranges)
    row = PackedRow(
        policy=policy,
        batch_number=batch_number,
        index=0,
        tokens=as_column(np.concatenate([layout.tokens for layout in layouts])),
        positions=as_column(positions),
        segment_starts=_ints(np.append(starts, begins[-1])),
        range_counts=TokenColumn(len(above) for layout in layouts for above in layout.ancestors),
        range_starts=_ints(bounds[:, 0]),
        range_ends=_ints(bounds[:, 1]),
        **_occurrences(
            [(call, int(begin)) for piece, begin in zip(pieces, begins, strict=False) for call in piece.calls]
        ),
    )
    return WrittenRow(row, int(positions.sum(dtype=np.int64)) + len(positions))


def _occurrences(calls: Sequence[tuple[RowCall, int]]) -> dict[str, Any]:
    """The columns of calls, each with the row offset of its piece, in order of their sources."""
    sizes = [len(call.sources) for call, _ in calls]
    sources = np.concatenate([call.sources + begin for call, begin in calls])
    order = np.argsort(sources, kind="stable")

    def per_call(values: list[float]) -> FloatColumn:
        return _floats(np.repeat(np.asarray(values, dtype=np.float32), sizes)[order])

    ordinals = np.repeat(np.arange(len(calls), dtype=np.int32), sizes)
    logprobs = [_as_floats(call.call.logprobs)[call.indexes] for call, _ in calls]
    return {
        "sources": _ints(sources[order]),
        "targets": as_column(np.concatenate([call.targets for call, _ in calls])[order]),
        "engine_logprobs": _floats(np.concatenate(logprobs)[order]),
        "temperatures": per_call([call.call.temperature for call, _ in calls]),
        "weights": per_call([call.weight for call, _ in calls]),
        "advantages": per_call([call.advantage for call, _ in calls]),
        "call_ordinals": as_column(ordinals[order]),
        "call_indexes": as_column(np.concatenate([call.indexes for call, _ in calls])[order]),
        "call_ids": tuple(call.call.call_id for call, _ in calls),
        "first_versions": tuple(call.call.policy.first for call, _ in calls),
        "last_versions": tuple(call.call.policy.last for call, _ in calls),
    }


def _ints(values: Ints) -> TokenColumn:
    return as_column(values.astype(np.int32))


def _as_floats(column: FloatColumn) -> _Floats:
    return np.frombuffer(column.data, dtype="<f4").astype(np.float32, copy=False)


def _floats(values: _Floats) -> FloatColumn:
    return FloatColumn.from_bytes(np.ascontiguousarray(values, dtype="<f4").tobytes())
