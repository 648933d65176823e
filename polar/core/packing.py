"""ScoredGroups → packed rows: every trained occurrence in exactly one row, under its exact prefix.

| builder | a row holds |
|---|---|
| per_request | one causal sequence a call |
| prefix_merging | one causal sequence a leaf of the tree; a call is trained in one that contains it |
| prefix_tree | branches of the tree, with what they share once (polar.core.row_filling) |

A path longer than a row keeps its exact causal prefix; the tokens beyond are listed.
Byte-deterministic: equal groups, builder and budget give equal rows.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from polar.core.bin_filling import fill_bins
from polar.core.needed_tree import Place, needed_tree
from polar.core.row_filling import fill_rows
from polar.core.row_writing import RowCall, RowPiece, WrittenRow, write_row
from polar.core.trained_calls import Rollout, TrainedBatch, TrainedCall, trained_batch
from polar.core.tree_cutting import Part
from polar.core.tree_layout import lay_out
from schemas.batches import Builder, PackedRow
from schemas.groups import ScoredGroup
from schemas.trees import ListedItem

ALGORITHM = "pack-3"


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The rows of a batch and what its manifest says about them."""

    rows: tuple[PackedRow, ...]
    row_pairs: tuple[int, ...]
    """[rows] attention pairs of each."""
    live_rollouts: int
    trained_tokens: int
    truncated: tuple[ListedItem, ...]
    """Calls of which tokens lie beyond the row budget (`row_truncated`)."""
    metrics: dict[str, float]


@dataclass(slots=True)
class _Piece:
    """Branches that lie side by side in a row, and the calls that are trained in them."""

    ends: list[Place]
    """Of the paths that it holds."""
    tokens: int
    calls: list[TrainedCall] = field(default_factory=list)


def pack(
    groups: Sequence[ScoredGroup], *, builder: Builder, row_tokens: int, policy: str, batch_number: int
) -> PackedBatch:
    """Pack the live ones of `groups` into rows of at most `row_tokens` tokens."""
    batch = trained_batch(groups, row_tokens)
    counts: Counter[Rollout] = Counter()
    for call in batch.calls:
        counts[call.rollout] += len(call.indexes)
    weights = {rollout: 1 / len(counts) / count for rollout, count in counts.items()}
    written = [
        write_row(
            [_row_piece(piece, batch, weights) for piece in pieces], policy=policy, batch_number=batch_number
        )
        for pieces in _rows(batch, builder, row_tokens)
    ]
    # The longest jobs first: dealt out in this order, ranks end at nearly the same time.
    written.sort(key=lambda row: (-row.pairs, -len(row.row.tokens)))
    return PackedBatch(
        rows=tuple(each.row.model_copy(update={"index": index}) for index, each in enumerate(written)),
        row_pairs=tuple(each.pairs for each in written),
        live_rollouts=len(counts),
        trained_tokens=counts.total(),
        truncated=tuple(batch.truncated),
        metrics=_metrics(batch, written, row_tokens),
    )


def _metrics(batch: TrainedBatch, written: Sequence[WrittenRow], row_tokens: int) -> dict[str, float]:
    computed = sum(len(row.row.tokens) for row in written)
    distinct = batch.tree.num_tokens
    return {
        "row_fill": computed / (len(written) * row_tokens) if written else 0.0,
        "computed_tokens": float(computed),
        "unique_tokens": float(batch.unique_tokens),
        "common_tokens": float(batch.unique_tokens - distinct),
        "repeated_ancestor_tokens": float(computed - distinct),
        "naive_tokens": float(sum(call.depth for call in batch.calls)),
        "truncated_calls": float(len(batch.truncated)),
    }


def _rows(batch: TrainedBatch, builder: Builder, row_tokens: int) -> list[list[_Piece]]:
    if builder == "prefix_tree":
        return [[piece] for piece in _pieces(batch, fill_rows(batch.tree, row_tokens))]
    if builder == "per_request":
        pieces = [_Piece([call.end], call.depth, [call]) for call in batch.calls]
    else:
        leaves = [node for node in range(len(batch.tree)) if not batch.tree.children[node]]
        pieces = _pieces(batch, [Part([leaf], batch.tree.end(leaf)) for leaf in leaves])
    bins = fill_bins([piece.tokens for piece in pieces], row_tokens)
    return [[pieces[index] for index in members] for members in bins]


def _pieces(batch: TrainedBatch, parts: Sequence[Part]) -> list[_Piece]:
    """A piece a part; each call in that of the first leaf below its end."""
    tree = batch.tree
    pieces = [_Piece([tree.place(leaf) for leaf in part.leaves], part.tokens) for part in parts]
    piece_of = {leaf: piece for part, piece in zip(parts, pieces, strict=True) for leaf in part.leaves}
    node_of = {run: node for node, run in enumerate(tree.runs)}
    leaves = tree.first_leaves()
    for call in batch.calls:
        piece_of[leaves[node_of[call.end[0]]]].calls.append(call)
    return pieces


def _row_piece(piece: _Piece, batch: TrainedBatch, weights: dict[Rollout, float]) -> RowPiece:
    tree = needed_tree(batch.paths, piece.ends)
    layout = lay_out(tree, batch.paths)
    node_of = {run: node for node, run in enumerate(tree.runs)}
    calls = []
    for call in piece.calls:
        depths = call.call.prompt_tokens + call.indexes.astype(np.int64)
        node = node_of[call.end[0]]
        calls.append(
            RowCall(
                call=call.call,
                indexes=call.indexes,
                sources=layout.offsets(node, depths - 1),
                targets=layout.tokens[layout.offsets(node, depths)],
                weight=weights[call.rollout],
                advantage=call.advantage,
            )
        )
    return RowPiece(layout, calls)
