"""ScoredGroups → packed rows: every trained occurrence in exactly one row, under its exact prefix.

| builder | a row holds |
|---|---|
| per_request | one causal sequence a call |
| prefix_merging | one causal sequence a leaf of the tree; a call is trained in one that contains it |
| prefix_tree | trees: what branches share is there once (polar.core.tree_cutting, row_filling) |

A path longer than a row keeps its exact causal prefix; the tokens beyond are listed.
Byte-deterministic: equal groups, builder and budget give equal rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from polar.core.bin_filling import fill_bins
from polar.core.needed_tree import NeededTree, Place, needed_tree
from polar.core.prefix_tree import Tokens, TreePaths
from polar.core.row_filling import Share, fill_rows
from polar.core.row_writing import RowCall, RowPiece, write_row
from polar.core.tree_cutting import cut
from polar.core.tree_layout import lay_out
from schemas.batches import Builder, PackedRow
from schemas.groups import ScoredGroup
from schemas.trees import ListedItem, StitchedCall

ALGORITHM = "pack-2"

_Rollout = tuple[int, str]
"""(index of the group in the batch, session_id)."""


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


@dataclass(frozen=True, slots=True)
class _TrainedCall:
    """A call with its occurrences inside the row budget."""

    rollout: _Rollout
    call: StitchedCall
    advantage: float
    indexes: Tokens
    """[n] indexes into the completion that are trained, ascending; n > 0."""
    end: Place
    """Where its last trained token lies in the tree of its group."""
    depth: int
    """Length of the path up to there."""


@dataclass(frozen=True, slots=True)
class _TrainedGroup:
    """A live group: its trained calls and the tree that they need."""

    paths: TreePaths
    calls: list[_TrainedCall]
    tree: NeededTree


@dataclass(slots=True)
class _Piece:
    """Branches of one group that lie in one row, and the calls that are trained there."""

    group: _TrainedGroup
    ends: list[Place]
    tokens: int
    calls: list[_TrainedCall] = field(default_factory=list)


def pack(
    groups: Sequence[ScoredGroup], *, builder: Builder, row_tokens: int, policy: str, batch_number: int
) -> PackedBatch:
    """Pack the live ones of `groups` into rows of at most `row_tokens` tokens."""
    truncated: list[ListedItem] = []
    live = [
        _trained_group(number, group, row_tokens, truncated)
        for number, group in enumerate(groups)
        if group.live
    ]
    counts: dict[_Rollout, int] = {}
    for call in (call for group in live for call in group.calls):
        counts[call.rollout] = counts.get(call.rollout, 0) + len(call.indexes)
    weights = {rollout: 1 / len(counts) / count for rollout, count in counts.items()}
    filled = (
        _tree_rows(live, row_tokens) if builder == "prefix_tree" else _flat_rows(live, builder, row_tokens)
    )
    written = [
        write_row([_row_piece(piece, weights) for piece in pieces], policy=policy, batch_number=batch_number)
        for pieces in filled
    ]
    # The longest jobs first: dealt out in this order, ranks end at nearly the same time.
    written.sort(key=lambda row: (-row.pairs, -len(row.row.tokens)))
    computed = sum(len(row.row.tokens) for row in written)
    unique = sum(group.tree.num_tokens for group in live)
    return PackedBatch(
        rows=tuple(each.row.model_copy(update={"index": index}) for index, each in enumerate(written)),
        row_pairs=tuple(each.pairs for each in written),
        live_rollouts=len(counts),
        trained_tokens=sum(counts.values()),
        truncated=tuple(truncated),
        metrics={
            "row_fill": computed / (len(written) * row_tokens) if written else 0.0,
            "computed_tokens": float(computed),
            "unique_tokens": float(unique),
            "repeated_ancestor_tokens": float(computed - unique),
            "naive_tokens": float(sum(call.depth for group in live for call in group.calls)),
            "truncated_calls": float(len(truncated)),
        },
    )


def _trained_group(
    number: int, group: ScoredGroup, row_tokens: int, truncated: list[ListedItem]
) -> _TrainedGroup:
    """The occurrences of a group that fit a row; others are added to `truncated`."""
    paths = TreePaths(group.tree)
    calls: list[_TrainedCall] = []
    for advantage, call in _trained(group):
        indexes, beyond = _occurrences(call, row_tokens)
        if beyond:
            detail = f"{beyond} trained tokens at depth {row_tokens} or deeper"
            truncated.append(ListedItem(id=call.call_id, reason="row_truncated", detail=detail))
        if len(indexes):
            depth = call.prompt_tokens + int(indexes[-1]) + 1
            end = paths.ancestor(call.end_run, call.end_offset, depth)
            calls.append(_TrainedCall((number, call.session_id), call, advantage, indexes, end, depth))
    return _TrainedGroup(paths, calls, needed_tree(paths, (call.end for call in calls)))


def _trained(group: ScoredGroup) -> list[tuple[float, StitchedCall]]:
    """(advantage, call) of the usable calls of scored members, in the group's order."""
    scored = {member.session_id: member.advantage for member in group.members if member.excluded is None}
    return [
        (scored[call.session_id], call)
        for call in group.calls
        if call.untrainable is None and call.session_id in scored
    ]


def _occurrences(call: StitchedCall, row_tokens: int) -> tuple[Tokens, int]:
    """(completion indexes that are trained and fit, number that do not fit)."""
    kept = np.ones(call.sampled_tokens, dtype=bool)
    kept[np.asarray(call.masked.tolist(), dtype=np.int64)] = False
    indexes = np.flatnonzero(kept).astype(np.int32)
    fitting = indexes[call.prompt_tokens + indexes < row_tokens]
    return fitting, len(indexes) - len(fitting)


def _tree_rows(groups: Sequence[_TrainedGroup], row_tokens: int) -> list[list[_Piece]]:
    trees = [group.tree for group in groups]
    shares = [Share(at, part) for at, tree in enumerate(trees) for part in cut(tree, row_tokens)]
    rows: list[list[_Piece]] = []
    piece_of: list[dict[int, _Piece]] = [{} for _ in groups]
    """Per group: leaf → the piece that holds it."""
    for filled in fill_rows(trees, shares, row_tokens):
        rows.append([])
        for share in filled:
            leaves = share.part.leaves
            ends = [trees[share.tree].place(leaf) for leaf in leaves]
            rows[-1].append(_Piece(groups[share.tree], ends, share.part.tokens))
            piece_of[share.tree] |= dict.fromkeys(leaves, rows[-1][-1])
    for group, found in zip(groups, piece_of, strict=True):
        node_of = {run: node for node, run in enumerate(group.tree.runs)}
        leaves = group.tree.first_leaves()
        for call in group.calls:
            found[leaves[node_of[call.end[0]]]].calls.append(call)
    return rows


def _flat_rows(groups: Sequence[_TrainedGroup], builder: Builder, row_tokens: int) -> list[list[_Piece]]:
    pieces: list[_Piece] = []
    for group in groups:
        if builder == "per_request":
            pieces += [_Piece(group, [call.end], call.depth, [call]) for call in group.calls]
        else:
            pieces += _leaf_pieces(group)
    bins = fill_bins([piece.tokens for piece in pieces], row_tokens)
    return [[pieces[index] for index in members] for members in bins]


def _leaf_pieces(group: _TrainedGroup) -> list[_Piece]:
    """A piece a leaf; each call in that of the first leaf below its end."""
    tree = group.tree
    pieces = {
        node: _Piece(group, [tree.place(node)], tree.end(node))
        for node in range(len(tree))
        if not tree.children[node]
    }
    node_of = {run: node for node, run in enumerate(tree.runs)}
    leaves = tree.first_leaves()
    for call in group.calls:
        pieces[leaves[node_of[call.end[0]]]].calls.append(call)
    return list(pieces.values())


def _row_piece(piece: _Piece, weights: dict[_Rollout, float]) -> RowPiece:
    tree = needed_tree(piece.group.paths, piece.ends)
    layout = lay_out(tree, piece.group.paths)
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
