"""ScoredGroups → packed rows: every trained occurrence in exactly one row, under its exact prefix.

`per_request` makes one causal sequence a call. `prefix_merging` makes one a leaf of the tree and
trains each call in one of the sequences that contain it. Sequences are packed into rows by
first-fit decreasing. A path longer than a row keeps its exact causal prefix; the tokens beyond
are listed. Byte-deterministic: equal groups, builder and budget give equal rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polar.core.prefix_tree import Tokens, TreePaths, as_column
from schemas.batches import Builder, PackedRow
from schemas.columns import FloatColumn
from schemas.groups import ScoredGroup
from schemas.trees import ListedItem, StitchedCall

ALGORITHM = "pack-1"

_Floats = npt.NDArray[np.float32]
_Place = tuple[int, int]
_Rollout = tuple[int, str]
"""(index of the group in the batch, session_id)."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The rows of a batch and what its manifest says about them."""

    rows: tuple[PackedRow, ...]
    live_rollouts: int
    trained_tokens: int
    truncated: tuple[ListedItem, ...]
    """Calls of which tokens lie beyond the row budget (`row_truncated`)."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class _TrainedCall:
    """A call with its occurrences inside the row budget."""

    ordinal: int
    """Order in the batch: groups, members, seq."""
    rollout: _Rollout
    call: StitchedCall
    advantage: float
    indexes: Tokens
    """[n] indexes into the completion that are trained, ascending; n > 0."""
    end: _Place
    """Where its last trained token lies in the tree of its group."""
    depth: int
    """Length of the path up to there."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One causal sequence and the calls that are trained in it."""

    tokens: Tokens
    calls: list[_TrainedCall]


def pack(
    groups: Sequence[ScoredGroup], *, builder: Builder, row_tokens: int, policy: str, batch_number: int
) -> PackedBatch:
    """Pack the live ones of `groups` into rows of at most `row_tokens` tokens."""
    sequences: list[_Sequence] = []
    truncated: list[ListedItem] = []
    counts: dict[_Rollout, int] = {}
    ordinal = unique = naive = 0
    for number, group in enumerate(groups):
        if not group.live:
            continue
        paths = TreePaths(group.tree)
        calls: list[_TrainedCall] = []
        for advantage, call in _trained(group):
            indexes, cut = _occurrences(call, row_tokens)
            if cut:
                detail = f"{cut} trained tokens at depth {row_tokens} or deeper"
                truncated.append(ListedItem(id=call.call_id, reason="row_truncated", detail=detail))
            if not len(indexes):
                continue
            rollout = (number, call.session_id)
            counts[rollout] = counts.get(rollout, 0) + len(indexes)
            depth = call.prompt_tokens + int(indexes[-1]) + 1
            end = paths.ancestor(call.end_run, call.end_offset, depth)
            calls.append(_TrainedCall(ordinal, rollout, call, advantage, indexes, end, depth))
            ordinal += 1
        unique += _covered_tokens(calls, paths)
        naive += sum(call.depth for call in calls)
        sequences += _sequences(calls, paths, builder)
    weights = {rollout: 1 / len(counts) / count for rollout, count in counts.items()}
    rows = tuple(
        _row(row, weights, policy, batch_number, index)
        for index, row in enumerate(_first_fit_decreasing(sequences, row_tokens))
    )
    computed = sum(len(sequence.tokens) for sequence in sequences)
    return PackedBatch(
        rows=rows,
        live_rollouts=len(counts),
        trained_tokens=sum(counts.values()),
        truncated=tuple(truncated),
        metrics={
            "row_fill": computed / (len(rows) * row_tokens) if rows else 0.0,
            "computed_tokens": float(computed),
            "unique_tokens": float(unique),
            "naive_tokens": float(naive),
            "truncated_calls": float(len(truncated)),
        },
    )


def _trained(group: ScoredGroup) -> list[tuple[float, StitchedCall]]:
    """(advantage, call) of the usable calls of scored members, in the group's order."""
    scored = {member.session_id: member.advantage for member in group.members if member.excluded is None}
    return [
        (scored[call.session_id] + group.call_credits.get(call.call_id, 0.0), call)
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


def _covered_tokens(calls: Sequence[_TrainedCall], paths: TreePaths) -> int:
    """Distinct (prefix, token) pairs on the paths of the calls."""
    extents: dict[int, int] = {}
    for call in calls:
        run, extent = call.end
        while run >= 0 and extents.get(run, 0) < extent:
            extents[run] = extent
            run = paths.parents[run]
            extent = paths.length(run) if run >= 0 else 0
    return sum(extents.values())


def _sequences(calls: Sequence[_TrainedCall], paths: TreePaths, builder: Builder) -> list[_Sequence]:
    if builder == "per_request":
        return [_Sequence(paths.path(*call.end), [call]) for call in calls]
    by_end: dict[_Place, list[_TrainedCall]] = {}
    for call in calls:
        by_end.setdefault(call.end, []).append(call)
    # In depth-first order an end that is a prefix of any other is a prefix of the next one, so
    # walking backwards each end joins the sequence of the next, or is a leaf itself.
    leaves: list[tuple[_Place, list[_TrainedCall]]] = []
    following: _Place | None = None
    for end in sorted(by_end, reverse=True):
        if following is None or not paths.is_prefix(end, following):
            leaves.append((end, []))
        leaves[-1][1].extend(by_end[end])
        following = end
    return [
        _Sequence(paths.path(*end), sorted(joined, key=lambda call: call.ordinal))
        for end, joined in reversed(leaves)
    ]


def _first_fit_decreasing(sequences: Sequence[_Sequence], row_tokens: int) -> list[list[_Sequence]]:
    """Sequences by row; equal lengths keep their order."""
    rows: list[list[_Sequence]] = []
    free: list[int] = []
    for sequence in sorted(sequences, key=lambda sequence: -len(sequence.tokens)):
        size = len(sequence.tokens)
        at = next((row for row, room in enumerate(free) if room >= size), None)
        if at is None:
            at = len(rows)
            rows.append([])
            free.append(row_tokens)
        rows[at].append(sequence)
        free[at] -= size
    return rows


def _row(
    sequences: Sequence[_Sequence],
    weights: dict[_Rollout, float],
    policy: str,
    batch_number: int,
    index: int,
) -> PackedRow:
    starts = np.cumsum([0, *(len(sequence.tokens) for sequence in sequences)], dtype=np.int32)
    tokens = np.concatenate([sequence.tokens for sequence in sequences])
    calls = [
        (call, int(start))
        for sequence, start in zip(sequences, starts, strict=False)
        for call in sequence.calls
    ]
    targets_at = [start + call.call.prompt_tokens + call.indexes for call, start in calls]
    sizes = [len(call.indexes) for call, _ in calls]
    targets = np.concatenate(targets_at).astype(np.int32)
    order = np.argsort(targets, kind="stable")

    def per_call(values: list[float]) -> FloatColumn:
        return _floats(np.repeat(np.asarray(values, dtype=np.float32), sizes)[order])

    logprobs = [_as_floats(call.call.logprobs)[call.indexes] for call, _ in calls]
    ordinals = np.repeat(np.arange(len(calls), dtype=np.int32), sizes)
    return PackedRow(
        policy=policy,
        batch_number=batch_number,
        index=index,
        tokens=as_column(tokens),
        positions=as_column(np.arange(len(tokens), dtype=np.int32) - np.repeat(starts[:-1], np.diff(starts))),
        sequence_starts=as_column(starts),
        sources=as_column(targets[order] - 1),
        targets=as_column(tokens[targets[order]]),
        engine_logprobs=_floats(np.concatenate(logprobs)[order]),
        temperatures=per_call([call.call.temperature for call, _ in calls]),
        weights=per_call([weights[call.rollout] for call, _ in calls]),
        advantages=per_call([call.advantage for call, _ in calls]),
        call_ordinals=as_column(ordinals[order]),
        call_indexes=as_column(np.concatenate([call.indexes for call, _ in calls])[order]),
        call_ids=tuple(call.call.call_id for call, _ in calls),
        first_versions=tuple(call.call.policy.first for call, _ in calls),
        last_versions=tuple(call.call.policy.last for call, _ in calls),
    )


def _as_floats(column: FloatColumn) -> _Floats:
    return np.frombuffer(column.data, dtype="<f4").astype(np.float32, copy=False)


def _floats(values: _Floats) -> FloatColumn:
    return FloatColumn.from_bytes(np.ascontiguousarray(values, dtype="<f4").tobytes())
