"""A tree of a whole batch → rows of a token budget: few tokens computed, few rows.

The tree is cut with the least repeated ancestors (polar.core.tree_cutting) and the parts are packed
whole. Then rows are given up, one after the other: the branches of one are laid into the gaps of the others,
whole where they fit, else some here and some there; where that finds no more, rows are dealt out anew
(polar.core.row_search). Both may repeat ancestors, so the row goes whose branches repeat the fewest, and
at most MAX_REPEATED of all tokens are spent: a row that is not full leaves ranks idle, a repeated token
costs for sure.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from polar.core.bin_filling import fill_bins, fullest
from polar.core.needed_tree import NeededTree
from polar.core.row_search import with_fewer_rows
from polar.core.tree_cutting import Part, cut, least_tokens

MAX_REPEATED = 0.01
"""Tokens that may be repeated for the sake of fewer rows, as a share of all."""
_UNIT = 4
"""A branch of at most the budget divided by this is never split."""
_CANDIDATES = 24
"""Rows that are tried for each one that is given up."""


def fill_rows(tree: NeededTree, budget: int) -> list[Part]:
    """Rows of at most `budget` tokens, each leaf in one; a longer path has a row for itself."""
    parts = cut(tree, budget)
    bins = fill_bins([part.tokens for part in parts], budget)
    rows = [
        Part(
            sorted(leaf for index in members for leaf in parts[index].leaves),
            sum(parts[index].tokens for index in members),
        )
        for members in bins
    ]
    allowed = int(sum(row.tokens for row in rows) * (1 + MAX_REPEATED))
    filled = _Gaps(tree, budget, rows).fill(allowed)
    fitting = [row for row in filled if row.tokens <= budget]
    longer = [row for row in filled if row.tokens > budget]
    beyond = sum(row.tokens for row in longer)
    fewest = -(-(least_tokens(tree, budget) - beyond) // budget)
    return [*longer, *with_fewer_rows(tree, budget, fitting, allowed=allowed - beyond, fewest=fewest)]


@dataclass(frozen=True, slots=True)
class _Branch:
    """Leaves of one row that stay together."""

    leaves: tuple[int, ...]
    tokens: int
    """Below the fork that it leaves."""


class _Gaps:
    """Rows, and the room that is left in them."""

    def __init__(self, tree: NeededTree, budget: int, rows: list[Part]) -> None:
        self._tree = tree
        self._budget = budget
        self._rows = rows
        self._covered = [tree.covered(row.leaves) for row in rows]
        self._head_of = tree.branch_heads(budget // _UNIT)

    def fill(self, allowed: int) -> list[Part]:
        """The rows that are left when none can be given up any more, with at most `allowed` tokens."""
        tokens = sum(row.tokens for row in self._rows)
        while len(self._rows) > -(-tokens // self._budget):
            found = self._cheapest(allowed - tokens)
            if found is None:
                break
            index, gains = found
            for at, leaves in gains.items():
                self._covered[at] |= self._tree.covered(leaves)
                self._rows[at] = self._part([*self._rows[at].leaves, *leaves], self._covered[at])
            del self._rows[index], self._covered[index]
            tokens = sum(row.tokens for row in self._rows)
        return self._rows

    def _part(self, leaves: Iterable[int], covered: Iterable[int]) -> Part:
        return Part(sorted(leaves), sum(self._tree.lengths[node] for node in covered))

    def _cheapest(self, allowance: int) -> tuple[int, dict[int, list[int]]] | None:
        """(row to give up, what others take of it), for at most so many tokens more."""
        room = sum(max(0, self._budget - row.tokens) for row in self._rows)
        costs = []
        for index, row in enumerate(self._rows):
            if row.tokens <= room - max(0, self._budget - row.tokens):
                costs.append((self._estimate(index), index))
        best: tuple[int, int, dict[int, list[int]]] | None = None
        for _, index in sorted(costs)[:_CANDIDATES]:
            dealt = self._deal_out(index)
            if dealt is not None:
                more = dealt[0] - self._rows[index].tokens
                if more <= allowance and (best is None or more < best[0]):
                    best = more, index, dealt[1]
        return None if best is None else best[1:]

    def _estimate(self, index: int) -> int:
        """Grows with what is repeated if the branches of a row are dealt out."""
        branches = self._branches(index)
        return sum(self._above(fork) * branch.tokens for fork, found in branches.items() for branch in found)

    def _above(self, fork: int) -> int:
        return self._tree.end(fork) if fork >= 0 else 0

    def _branches(self, index: int) -> dict[int, list[_Branch]]:
        """The branches of a row by the fork (node, or -1) that they leave."""
        by_head: dict[int, list[int]] = {}
        for leaf in self._rows[index].leaves:
            by_head.setdefault(self._head_of[leaf], []).append(leaf)
        found: dict[int, list[_Branch]] = {}
        for head, leaves in by_head.items():
            fork = self._tree.parents[head]
            inside = self._tree.covered(leaves, above=fork)
            tokens = sum(self._tree.lengths[node] for node in inside)
            found.setdefault(fork, []).append(_Branch(tuple(leaves), tokens))
        return found

    def _deal_out(self, index: int) -> tuple[int, dict[int, list[int]]] | None:
        """(tokens that others compute more, the leaves that each takes), or None: no room."""
        left = self._branches(index)
        gains: dict[int, list[int]] = {}
        used = 0
        gaps = [(self._budget - row.tokens, -at) for at, row in enumerate(self._rows) if at != index]
        for gap, at in sorted(gaps, reverse=True):
            room = gap
            while left:
                taken, fork, tokens = self._best_filling(left, -at, room)
                if not taken:
                    break
                gains.setdefault(-at, []).extend(leaf for branch in taken for leaf in branch.leaves)
                room -= tokens
                used += tokens
                left[fork] = [branch for branch in left[fork] if branch not in taken]
                left = {each: branches for each, branches in left.items() if branches}
        return None if left else (used, gains)

    def _best_filling(
        self, left: dict[int, list[_Branch]], at: int, room: int
    ) -> tuple[list[_Branch], int, int]:
        """(branches of one fork, the fork, tokens): what fills a gap best."""
        best: tuple[list[_Branch], int, int] = [], -1, 0
        most = 0
        for fork, branches in left.items():
            missing = self._tree.covered([fork], but=self._covered[at]) if fork >= 0 else set()
            stem = sum(self._tree.lengths[node] for node in missing)
            taken = [branches[each] for each in fullest([branch.tokens for branch in branches], room - stem)]
            tokens = sum(branch.tokens for branch in taken)
            if tokens > most:
                most = tokens
                best = taken, fork, tokens + stem
        return best
