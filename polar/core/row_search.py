"""Rows of a batch → fewer rows, by dealing out pairs of rows anew.

A row is given up: its leaves go where they cost least, and rows may be too full from then on. Then two
rows at a time are dealt out anew: all ways to deal up to FREE of their branches are weighed, and one
is drawn with the odds 2^(-cost / temperature). That is Gibbs sampling over pairs of rows, cooled as in
simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983). The cost of a way is the tokens of both rows,
where tokens beyond the budget count more. Where no row is too full any more, the search goes on at
the lowest temperature for a while, to repeat fewer ancestors.

Deterministic on every machine: costs and odds are integers, draws come from a fixed seed.
"""

import heapq
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from polar.core.needed_tree import NeededTree
from polar.core.tree_cutting import Part

FREE = 8
"""Branches of a pair of rows that are dealt out at once, in 2^FREE ways."""
STEPS = 400
"""Pairs that are dealt out anew for each row, in one try to reach a number of rows."""
MOST_STEPS = 120_000
"""The same for all rows together: about five seconds."""
ALL_STEPS = 360_000
"""The same for all tries together; no try begins beyond."""
_UNIT = 16
"""A branch of at most the budget divided by this is dealt out whole."""
_TRIES = ((20, 16), (50, 24), (20, 16))
"""What is tried, one after the other, each with other draws: (what a token beyond the budget costs, in
repeated tokens; how many times less than the room of a row the first temperature is, in such tokens)."""
_COOLINGS = 3
"""The temperature is halved so many times during a try."""
_COLDEST = 256
"""Where no row is too full any more, the temperature is so many times less than the first."""
_SETTLING, _LONGEST_SETTLING = 5, 60
"""Pairs for each row that are dealt out at the last temperature: at least, and at most while too much is
repeated."""
_CANDIDATES = 1_024
"""Rows that are looked at for a leaf of a row that is given up."""
_STRIDE = 1_024
"""With more rows, so many times less than they are is given up at once."""
_NEAR = 16
"""Leaves so close in the depth-first order are likely to share ancestors."""
_WALK = 64
"""Looking at so many nodes takes as long as dealing a pair of rows with few."""
_TOUCHED = np.array([[float(way & bits != 0) for way in range(1 << FREE)] for bits in range(1 << FREE)])
"""[bits of branches, way] 1 where a row that gets the branches of a way gets one of those of `bits`."""
_OCTAVE = 32
_ODDS = np.array([*(round(2 ** (20 - at / _OCTAVE)) for at in range(21 * _OCTAVE)), 0])
"""[cost * _OCTAVE // temperature] odds; the last entry is for all that costs more."""


def with_fewer_rows(
    tree: NeededTree, budget: int, rows: Sequence[Part], *, allowed: int, fewest: int
) -> list[Part]:
    """The leaves of `rows` in as few rows as a search finds, in the order that it leaves.

    `rows`: none above `budget`. `allowed`: most tokens of all rows that are returned, if rows were given up.
    `fewest`: a number of rows that need not be tried to go below.
    """
    best = list(rows)
    search = _Search(tree, budget, rows)
    done = 0
    stride = len(rows) // _STRIDE + 1
    for count in range(len(rows) - stride, max(fewest, 1) - 1, -stride):
        is_reached = False
        for price, coolness in _TRIES:
            if is_reached or done >= ALL_STEPS:
                break
            is_reached = search.reach(count, allowed, price, coolness, draws=done)
            done += search.steps
        if not is_reached:
            break
        best = [Part(sorted(row.leaves), row.tokens) for row in search.rows]
    return best


_Tokens = NDArray[np.float64]
"""[ways] tokens of a row."""


class _Row:
    """Some leaves with all their ancestors."""

    __slots__ = ("_tree", "leaves", "tokens", "uses")

    def __init__(self, tree: NeededTree, leaves: Iterable[int]) -> None:
        self._tree = tree
        self.leaves: list[int] = []
        self.tokens = 0
        self.uses: dict[int, int] = {}
        """Covered children of each covered node; 1 for a leaf."""
        for leaf in leaves:
            self.add(leaf)

    def add(self, leaf: int) -> None:
        self.leaves.append(leaf)
        node = leaf
        while node >= 0:
            before = self.uses.get(node, 0)
            self.uses[node] = before + 1
            if before:
                return
            self.tokens += self._tree.lengths[node]
            node = self._tree.parents[node]

    def remove(self, leaf: int) -> None:
        self.leaves.remove(leaf)
        node = leaf
        while node >= 0:
            after = self.uses.pop(node) - 1
            if after:
                self.uses[node] = after
                return
            self.tokens -= self._tree.lengths[node]
            node = self._tree.parents[node]

    def missing(self, leaf: int) -> int:
        """Tokens that a leaf would add."""
        tokens, node = 0, leaf
        while node >= 0 and node not in self.uses:
            tokens += self._tree.lengths[node]
            node = self._tree.parents[node]
        return tokens


class _Search:
    """Tries to do with fewer rows: rows while one is under way, and where each leaf is."""

    def __init__(self, tree: NeededTree, budget: int, rows: Sequence[Part]) -> None:
        self.rows: list[_Row] = []
        """Of the last try."""
        self.steps = 0
        """Pairs that were dealt out anew in it, to reach a number of rows."""
        self._tree = tree
        self._budget = budget
        self._given = rows
        self._heads = tree.branch_heads(budget // _UNIT)
        self._order = sorted(leaf for row in rows for leaf in row.leaves)
        self._rank = {leaf: at for at, leaf in enumerate(self._order)}
        self._price = 1
        """Cost of a token beyond the budget."""
        self._state = 0
        """Of the draws; see `_draw`."""
        self._row_of: dict[int, int] = {}
        self._tokens = 0
        """Of all rows."""
        self._overfull: dict[int, None] = {}
        """Rows above the budget; a dict, because a set has no order."""

    def reach(self, count: int, allowed: int, price: int, coolness: int, *, draws: int) -> bool:
        """Whether so many rows are enough, with at most `allowed` tokens; see _TRIES. Other `draws` lead
        to other rows.

        Each try begins with the rows that were given: rows that were found already repeat more.
        """
        self._price, self._state, self.steps = price, draws, 0
        self._tokens = 0
        self._overfull.clear()
        room = self._budget - sum(row.tokens for row in self._given) // count
        if room < 0:
            return False
        self.rows = [_Row(self._tree, row.leaves) for row in self._given]
        while len(self.rows) > count:
            self._give_up()
        for at, row in enumerate(self.rows):
            self._row_of.update(dict.fromkeys(row.leaves, at))
            self._note(at)
            self._tokens += row.tokens
        hottest = self._price * room // coolness
        most = min(STEPS * count, MOST_STEPS)
        while self._overfull and self.steps < most:
            self.steps += self._step(hottest >> self.steps * (_COOLINGS + 1) // most)
        return not self._overfull and self._settle(allowed, hottest // _COLDEST)

    def _settle(self, allowed: int, temperature: int) -> bool:
        done = 0
        least, most = (min(each * len(self.rows), MOST_STEPS) for each in (_SETTLING, _LONGEST_SETTLING))
        while done < least or (done < most and (self._tokens > allowed or self._overfull)):
            done += self._step(temperature)
        return self._tokens <= allowed and not self._overfull

    def _give_up(self) -> None:
        """Deal the leaves of the emptiest row out to those that are emptiest then."""
        most = heapq.nsmallest(_CANDIDATES + 1, [row.tokens for row in self.rows])[-1]
        least = min(self.rows, key=lambda row: row.tokens)
        self.rows.remove(least)
        emptiest = [row for row in self.rows if row.tokens <= most]
        for leaf in sorted(least.leaves, key=lambda leaf: -self._tree.end(leaf)):
            min(emptiest, key=lambda row: self._cost_with(row, leaf)).add(leaf)

    def _cost_with(self, row: _Row, leaf: int) -> int:
        missing = row.missing(leaf)
        return missing + self._price * max(0, missing - max(0, self._budget - row.tokens))

    def _note(self, at: int) -> None:
        if self.rows[at].tokens > self._budget:
            self._overfull[at] = None
        else:
            self._overfull.pop(at, None)

    def _draw(self, count: int) -> int:
        """0 … count - 1 by Knuth's linear congruential generator MMIX: equal batches give equal rows."""
        self._state = (self._state * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**64
        return (self._state >> 32) * count >> 32

    def _step(self, temperature: int) -> int:
        """Deal a pair of rows anew; the time that it took, in pairs with few nodes."""
        one, other = self._pair()
        if one == other:
            return 1
        before = self.rows[one].tokens + self.rows[other].tokens
        walked = self._deal_anew(one, other, max(1, temperature))
        self._tokens += self.rows[one].tokens + self.rows[other].tokens - before
        self._note(one)
        self._note(other)
        return 1 + walked // _WALK

    def _pair(self) -> tuple[int, int]:
        """Two rows, or one twice: mostly one is too full; half of the time leaves of both lie close."""
        if self._overfull and self._draw(4):
            one = list(self._overfull)[self._draw(len(self._overfull))]
        else:
            one = self._draw(len(self.rows))
        leaves = self.rows[one].leaves
        if leaves and self._draw(2):
            near = self._rank[leaves[self._draw(len(leaves))]] + self._draw(2 * _NEAR + 1) - _NEAR
            return one, self._row_of[self._order[near % len(self._order)]]
        return one, self._draw(len(self.rows))

    def _deal_anew(self, one: int, other: int, temperature: int) -> int:
        """Draw a way to deal out some branches of two rows; the nodes that were looked at."""
        first, second = self.rows[one], self.rows[other]
        units: dict[tuple[int, int], list[int]] = {}
        for at in (one, other):
            for leaf in self.rows[at].leaves:
                units.setdefault((self._heads[leaf], at), []).append(leaf)
        free = list(units.values())
        is_all = len(free) <= FREE
        while len(free) > FREE:
            free.pop(self._draw(len(free)))
        for unit in free:
            for leaf in unit:
                self.rows[self._row_of[leaf]].remove(leaf)
        under, walked = self._nodes_under(free, first, second)
        lengths = self._tree.lengths
        added = np.array(
            [
                [0 if node in first.uses else lengths[node] for node in under],
                [0 if node in second.uses else lengths[node] for node in under],
            ],
            dtype=np.float64,
        )
        # Whole numbers far below 2^53: exact in any order of summing.
        tokens = added @ _TOUCHED.take(list(under.values()), axis=0)
        last = (1 << len(free)) - 1
        # Of two mirrored ways one is enough where the rows hold nothing else.
        ways = last // 2 + 1 if is_all else last + 1
        to_second = second.tokens + tokens[1, last::-1]
        way = self._drawn(first.tokens + tokens[0, :ways], to_second[:ways], temperature)
        for number, unit in enumerate(free):
            at = one if way >> number & 1 else other
            for leaf in unit:
                self.rows[at].add(leaf)
                self._row_of[leaf] = at
        return walked

    def _nodes_under(
        self, units: Sequence[Sequence[int]], first: _Row, second: _Row
    ) -> tuple[dict[int, int], int]:
        """(by node on a path of `units` that not both rows hold: the bits of the units below it; nodes
        that were looked at)."""
        under: dict[int, int] = {}
        walked = 0
        for number, unit in enumerate(units):
            bit = 1 << number
            for leaf in unit:
                node = leaf
                while node >= 0 and not (node in first.uses and node in second.uses):
                    bits = under.get(node, 0)
                    if bits & bit:
                        break
                    under[node] = bits | bit
                    node = self._tree.parents[node]
                    walked += 1
        return under, walked

    def _drawn(self, first: _Tokens, second: _Tokens, temperature: int) -> int:
        beyond = np.maximum(first - self._budget, 0) + np.maximum(second - self._budget, 0)
        cost = first + second + self._price * beyond
        places = (cost - cost.min()) * _OCTAVE // temperature
        odds = _ODDS[np.minimum(places, len(_ODDS) - 1).astype(np.int64)].cumsum()
        return int(odds.searchsorted(self._draw(int(odds[-1])), side="right"))
