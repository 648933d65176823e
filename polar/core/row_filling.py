"""Parts of many trees → rows of a token budget: few rows, nearly all of them full.

Parts are packed whole first, which repeats nothing. Then rows are dissolved: the parts of one are
dealt out to the gaps in the others, split where they fork. Every split repeats ancestors, so the row whose
parts repeat the fewest goes first, and no more than MAX_REPEATED of all tokens are spent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polar.core.bin_filling import fill_bins, fullest
from polar.core.needed_tree import NeededTree
from polar.core.tree_cutting import Part

MAX_REPEATED = 0.01
"""Tokens that may be repeated to fill rows, as a share of all: padding costs a trainer less than
tokens that it computes, but rows that are not full leave ranks idle."""
_CANDIDATES = 16
"""Rows that are tried, for each one that is dissolved."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of one tree of a batch."""

    tree: int
    part: Part


def fill_rows(trees: Sequence[NeededTree], shares: Sequence[Share], budget: int) -> list[list[Share]]:
    """The shares by row, at most `budget` tokens each; a row has one share of a tree at most.

    A share above the budget gets a row of its own.
    """
    bins = fill_bins([share.part.tokens for share in shares], budget)
    rows = [[shares[index] for index in members] for members in bins]
    allowance = int(MAX_REPEATED * sum(share.part.tokens for share in shares))
    while True:
        total = sum(share.part.tokens for row in rows for share in row)
        if len(rows) <= -(-total // budget):
            break
        found = _cheapest_dissolution(trees, rows, budget, allowance)
        if found is None:
            break
        rows, extra = found
        allowance -= extra
    return [_one_share_a_tree(trees, row) for row in rows]


def _cheapest_dissolution(
    trees: Sequence[NeededTree], rows: list[list[Share]], budget: int, allowance: int
) -> tuple[list[list[Share]], int] | None:
    """(rows without one of them, tokens repeated for it)."""
    free = [budget - sum(share.part.tokens for share in row) for row in rows]
    widest = max(free)
    costs = []
    for index, row in enumerate(rows):
        if budget - free[index] <= sum(free) - free[index]:
            splits = [share.part.tokens // max(1, widest) * _stem(trees, share) for share in row]
            costs.append((sum(splits), free[index], index))
    best: tuple[int, int, list[tuple[int, Share]]] | None = None
    for _, _, index in sorted(costs)[:_CANDIDATES]:
        dealt = _deal_out(trees, rows[index], {at: room for at, room in enumerate(free) if at != index})
        if dealt is not None:
            moves, extra = dealt
            if extra <= allowance and (best is None or extra < best[0]):
                best = extra, index, moves
    if best is None:
        return None
    extra, index, moves = best
    kept = [list(row) for row in rows]
    for at, share in moves:
        kept[at].append(share)
    del kept[index]
    return kept, extra


def _deal_out(
    trees: Sequence[NeededTree], row: Sequence[Share], free: dict[int, int]
) -> tuple[list[tuple[int, Share]], int] | None:
    """(share by the row that it moves to, repeated tokens), or None where it does not fit."""
    moves: list[tuple[int, Share]] = []
    extra = 0
    for share in sorted(row, key=lambda share: -share.part.tokens):
        left = share
        while True:
            holding = [(room, at) for at, room in free.items() if room >= left.part.tokens]
            if holding:
                _, at = min(holding)
                moves.append((at, left))
                free[at] -= left.part.tokens
                break
            room, at = max((room, -at) for at, room in free.items())
            at = -at
            split = _split(trees[left.tree], left.part, room)
            if split is None:
                return None
            taken, rest = split
            moves.append((at, Share(left.tree, taken)))
            free[at] -= taken.tokens
            extra += taken.tokens + rest.tokens - left.part.tokens
            left = Share(left.tree, rest)
    return moves, extra


def _split(tree: NeededTree, part: Part, room: int) -> tuple[Part, Part] | None:
    """The branches at the part's first fork that fill `room` best, and the others."""
    stem, branches = _fork(tree, part)
    taken = fullest([branch.tokens for branch in branches], room - stem)
    if not taken:
        return None
    gone = set(taken)
    return (
        _rejoin(stem, [branches[index] for index in taken]),
        _rejoin(stem, [branch for index, branch in enumerate(branches) if index not in gone]),
    )


def _rejoin(stem: int, branches: Sequence[Part]) -> Part:
    return Part(
        sorted(leaf for branch in branches for leaf in branch.leaves),
        stem + sum(branch.tokens for branch in branches),
    )


def _stem(trees: Sequence[NeededTree], share: Share) -> int:
    return _fork(trees[share.tree], share.part)[0]


def _fork(tree: NeededTree, part: Part) -> tuple[int, list[Part]]:
    """(tokens that all leaves of a part share, its branches below; one branch: cannot be split)."""
    if len(part.leaves) == 1:
        return 0, [part]
    covered = sorted(_covered(tree, part.leaves))
    leaves = set(part.leaves)
    below = {node: int(node in leaves) for node in covered}
    """Leaves of the part at or below a node."""
    for node in reversed(covered):
        if tree.parents[node] >= 0:
            below[tree.parents[node]] += below[node]
    # A parent has a smaller number than its children: the last of those that hold all leaves.
    fork = max(node for node in covered if below[node] == len(leaves))
    branches: dict[int, Part] = {}
    branch_of: dict[int, int] = {}
    for node in covered:
        if node > fork:
            branch = branch_of[node] = branch_of.get(tree.parents[node], node)
            found = branches.setdefault(branch, Part([], 0))
            found.tokens += tree.lengths[node]
            found.leaves += [node] * (node in leaves)
    return tree.end(fork), list(branches.values())


def _covered(tree: NeededTree, leaves: Iterable[int]) -> set[int]:
    """The nodes on the paths of some leaves."""
    nodes: set[int] = set()
    for leaf in leaves:
        node = leaf
        while node >= 0 and node not in nodes:
            nodes.add(node)
            node = tree.parents[node]
    return nodes


def _one_share_a_tree(trees: Sequence[NeededTree], row: Sequence[Share]) -> list[Share]:
    """Shares of one tree in one row become one: what they have in common is there once."""
    joined: dict[int, list[int]] = {}
    for share in row:
        joined.setdefault(share.tree, []).extend(share.part.leaves)
    found = []
    for at, leaves in joined.items():
        tree = trees[at]
        tokens = sum(tree.lengths[node] for node in _covered(tree, leaves))
        found.append(Share(at, Part(sorted(leaves), tokens)))
    return found
