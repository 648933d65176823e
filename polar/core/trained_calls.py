"""The live groups of a batch → its trained calls, in one tree.

Groups share what their harness shares: one tree for the batch holds a system prompt once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polar.core.needed_tree import NeededTree, Place, needed_tree
from polar.core.prefix_tree import PrefixTree, Tokens, TreePaths
from schemas.groups import ScoredGroup
from schemas.trees import ListedItem, StitchedCall

Rollout = tuple[int, str]
"""(index of the group in the batch, session_id)."""


@dataclass(frozen=True, slots=True)
class TrainedCall:
    """A call with its occurrences inside the row budget."""

    rollout: Rollout
    call: StitchedCall
    advantage: float
    indexes: Tokens
    """[n] indexes into the completion that are trained, ascending; n > 0."""
    end: Place
    """Where its last trained token lies in the tree of the batch."""
    depth: int
    """Length of the path up to there."""


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """What a batch trains."""

    paths: TreePaths
    calls: list[TrainedCall]
    """In order of groups, members, seq."""
    tree: NeededTree
    """What the calls need."""
    unique_tokens: int
    """Distinct (prefix, token) pairs, summed over the groups."""
    truncated: list[ListedItem]
    """Calls of which tokens lie beyond the row budget (`row_truncated`)."""


def trained_batch(groups: Sequence[ScoredGroup], row_tokens: int) -> TrainedBatch:
    """The trained calls of the live ones of `groups`."""
    tree = PrefixTree()
    truncated: list[ListedItem] = []
    unique = 0
    found = []
    for number, group in enumerate(groups):
        if not group.live:
            continue
        paths, places = TreePaths(group.tree), tree.insert_tree(group.tree)
        ends = []
        for advantage, call in _trained(group):
            indexes, beyond = _occurrences(call, row_tokens)
            if beyond:
                detail = f"{beyond} trained tokens at depth {row_tokens} or deeper"
                truncated.append(ListedItem(id=call.call_id, reason="row_truncated", detail=detail))
            if len(indexes):
                depth = call.prompt_tokens + int(indexes[-1]) + 1
                ends.append(paths.ancestor(call.end_run, call.end_offset, depth))
                position = places.locate(*ends[-1], tree)
                found.append(((number, call.session_id), call, advantage, indexes, position))
        unique += needed_tree(paths, ends).num_tokens
    exported = tree.export()
    calls = [
        TrainedCall(rollout, call, advantage, indexes, exported.locate(position), position.depth)
        for rollout, call, advantage, indexes, position in found
    ]
    paths = TreePaths(exported.tree)
    return TrainedBatch(paths, calls, needed_tree(paths, (call.end for call in calls)), unique, truncated)


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
