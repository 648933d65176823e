"""Whether the rows of a batch train what the engines sampled: read from the rows, not from the packer.

A trained occurrence is faithful when the tokens that it attends to are exactly the path on which
its call sampled it, and its target is the token that was sampled there. Rows hold ids alone: what
follows a picture is not faithful. Every row token is placed in the tree of each group that has
calls in the row, by following its branch from the root; an occurrence is compared by its place.
Time grows with the tokens of rows and trees, not with the lengths of the calls' histories.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from polar.core.prefix_tree import TreePaths, as_tokens
from polar.core.row_reading import RowBranches, ints
from schemas.batches import PackedRow
from schemas.groups import ScoredGroup
from schemas.trees import StitchedCall

_Places = npt.NDArray[np.int64]
"""[n] indexes into the token column of a group's tree; -1 where a token lies outside of it."""


def faithful_share(groups: Iterable[ScoredGroup], rows: Iterable[PackedRow]) -> float:
    """Sampled tokens that are trained exactly once, and faithfully, over all that should be: those of
    the usable calls of scored members of live groups, masked ones apart. 1 where there are none.
    """
    calls = {
        call.call_id: _Call(tree, call)
        for group in groups
        if group.live
        for tree in (_GroupTree(group),)
        for call in tree.trained
    }
    for row in rows:
        _read_row(row, calls)
    wanted = sum(each.call.sampled_tokens - len(each.call.masked) for each in calls.values())
    kept = sum(int(((each.trained == 1) & (each.faithful == 1)).sum()) for each in calls.values())
    return kept / wanted if wanted else 1.0


class _GroupTree:
    """Places in the tree of one group."""

    def __init__(self, group: ScoredGroup) -> None:
        self.paths = TreePaths(group.tree)
        scored = {member.session_id for member in group.members if member.excluded is None}
        self.trained = [
            call for call in group.calls if call.untrainable is None and call.session_id in scored
        ]
        self._depths = np.array(self.paths.depths, dtype=np.int64)
        self._starts = np.array(self.paths.starts, dtype=np.int64)
        self._texts = self.paths.tokens.copy()
        """[tokens] ids; -1, which no row holds, where a token stands for something else than text."""
        self._texts[[media.index for media in group.tree.media]] = -1
        self._children: dict[tuple[int, int], int] = {
            (parent, int(self._texts[self.paths.starts[run]])): run
            for run, parent in enumerate(self.paths.parents)
        }
        """(parent run, first token) → run."""

    def follow(self, place: int, tokens: npt.NDArray[np.int32]) -> _Places:
        """[n] places of `tokens` [n] after `place` (-1: the root); -1 from the first stray one on."""
        found = np.full(len(tokens), -1, dtype=np.int64)
        run = int(np.searchsorted(self.paths.starts, place, side="right")) - 1 if place >= 0 else -1
        at, here = 0, place + 1
        while at < len(tokens):
            if run < 0 or here == self.paths.starts[run + 1]:
                run = self._children.get((run, int(tokens[at])), -1)
                if run < 0:
                    break
                here = self.paths.starts[run]
            size = min(len(tokens) - at, self.paths.starts[run + 1] - here)
            same = self._texts[here : here + size] == tokens[at : at + size]
            agreed = size if same.all() else int(np.argmin(same))
            found[at : at + agreed] = np.arange(here, here + agreed)
            if agreed < size:
                break
            at, here = at + size, here + size
        return found

    def places_of(self, call: StitchedCall, depths: _Places) -> _Places:
        """[n] places of the tokens at these depths [n] of a call's path; -1 for depth -1."""
        runs: list[int] = []
        run = call.end_run
        while run >= 0:
            runs.append(run)
            run = self.paths.parents[run]
        chain = np.array(runs[::-1], dtype=np.int64)
        above = self._depths[chain]
        which = np.searchsorted(above, depths, side="right") - 1
        return np.where(depths >= 0, self._starts[chain[which]] + depths - above[which], -1)


class _Call:
    """A call that should be trained, and how often its tokens were."""

    def __init__(self, tree: _GroupTree, call: StitchedCall) -> None:
        self.tree = tree
        self.call = call
        self.trained = np.zeros(call.sampled_tokens, dtype=np.int64)
        self.faithful = np.zeros(call.sampled_tokens, dtype=np.int64)
        """[sampled_tokens] occurrences of each token, all of them and the faithful ones."""


def _read_row(row: PackedRow, calls: Mapping[str, _Call]) -> None:
    """Count the row's occurrences."""
    tokens, branches = as_tokens(row.tokens), RowBranches.of(row)
    sources, targets, indexes = ints(row.sources), ints(row.targets), ints(row.call_indexes)
    ordinals = ints(row.call_ordinals)
    by_call = np.split(
        np.argsort(ordinals, kind="stable"),
        np.cumsum(np.bincount(ordinals, minlength=len(row.call_ids)))[:-1],
    )
    placed: dict[int, _Places] = {}
    for call_id, occurrences in zip(row.call_ids, by_call, strict=True):
        each = calls.get(call_id)
        if each is None:
            continue
        tree, call = each.tree, each.call
        if id(tree) not in placed:
            placed[id(tree)] = _place_row(tokens, branches, tree)
        chosen = occurrences[indexes[occurrences] < call.sampled_tokens]
        own = indexes[chosen]
        depths = call.prompt_tokens + own
        before = tree.places_of(call, depths - 1)
        exact = (
            (before >= 0)
            & (placed[id(tree)][sources[chosen]] == before)
            & (targets[chosen] == tree.paths.tokens[tree.places_of(call, depths)])
        )
        np.add.at(each.trained, own, 1)
        np.add.at(each.faithful, own[exact], 1)


def _place_row(tokens: npt.NDArray[np.int32], branches: RowBranches, tree: _GroupTree) -> _Places:
    """[t] place of each row token in a tree, by its branch; -1 for branches that are not in it."""
    places = np.full(len(tokens), -1, dtype=np.int64)
    for segment in range(len(branches.starts) - 1):
        start, end = branches.starts[segment : segment + 2].tolist()
        above = branches.ancestors(segment)
        parent = int(places[above[-1, 1] - 1]) if len(above) else -1
        if len(above) and (parent < 0 or not branches.is_branch(segment)):
            continue
        places[start:end] = tree.follow(parent, tokens[start:end])
    return places
