"""A tree larger than a row → parts that fit one, with the least repeated ancestors.

The problem: choose sets of tokens, each closed under ancestors and at most `budget` tokens large,
so that every token is in one of them, with the least tokens in total. A set that holds a token
holds its whole path, so a run that is cut inside appears a second time up to the cut and saves
nothing: only whole leaf paths need be dealt out. What is left is to partition the leaves of a
tree, which is NP-hard (a star is bin packing). Three steps, each deterministic:

1. From the leaves up, the parts of a node's children share the node as few times as bin packing
   finds. A part never grows beyond the budget, and shallow nodes are repeated rather than deep ones.
2. `least_tokens` bounds every cut from below: a node lies in as many parts as the tokens below
   it need. Where step 1 meets the bound its cut is optimal, which is the usual case.
3. Otherwise a branch-and-bound search over partitions, to the end for trees of up to
   EXACT_LEAVES leaves, for larger ones up to SEARCH_LEAVES until SEARCH_STEPS are used up.

So the result is optimal up to EXACT_LEAVES leaves, and beyond never further from the optimum than
from `least_tokens`.
"""

from dataclasses import dataclass, field

from polar.core.bin_filling import fill_bins
from polar.core.needed_tree import NeededTree

_CHOICE = 3
"""With fewer parts to add to those of one child, best fit decreasing is as good as any packing."""
EXACT_LEAVES = 8
SEARCH_LEAVES = 24
SEARCH_STEPS = 20_000
"""More than the 5,295 steps that 8 leaves can take: every way to deal out 1, 2, … 8 of them."""


@dataclass(slots=True)
class Part:
    """Some leaves of a tree with all their ancestors."""

    leaves: list[int]
    tokens: int
    """Distinct tokens on the paths of the leaves."""


def cut(tree: NeededTree, budget: int) -> list[Part]:
    """Parts of at most `budget` tokens, each leaf in one; separate roots are never in one part.

    A leaf whose own path is longer than the budget has a part for itself.
    """
    return [part for root in tree.roots() for part in _cut_below(tree, root, budget)]


def least_tokens(tree: NeededTree, budget: int) -> int:
    """A number of tokens that no cut of the tree can go below."""
    return sum(_least(tree, _below(tree, root), budget) for root in tree.roots())


def _cut_below(tree: NeededTree, root: int, budget: int) -> list[Part]:
    nodes = _below(tree, root)
    leaves = [node for node in nodes if not tree.children[node]]
    tokens = sum(tree.lengths[node] for node in nodes)
    if tokens <= budget:
        return [Part(leaves, tokens)]
    parts = _grow(tree, nodes, budget)
    alone = [Part([leaf], tree.end(leaf)) for leaf in leaves if tree.end(leaf) > budget]
    floor = _least(tree, nodes, budget) - sum(part.tokens for part in alone)
    dealt = [leaf for leaf in leaves if tree.end(leaf) <= budget]
    if len(dealt) <= SEARCH_LEAVES and sum(part.tokens for part in parts) > floor:
        parts = _Search(tree, budget, floor, parts).run(dealt)
    for part in parts:
        part.leaves.sort()
    return sorted([*parts, *alone], key=lambda part: part.leaves[0])


def _below(tree: NeededTree, root: int) -> range:
    """A node and all below it: neighbours in the depth-first order."""
    last = root
    while tree.children[last]:
        last = tree.children[last][-1]
    return range(root, last + 1)


def _grow(tree: NeededTree, nodes: range, budget: int) -> list[Part]:
    """Step 1, without leaves that are too deep. `tokens` of a part under way counts from the node
    that it was grown to."""
    grown: dict[int, list[Part]] = {}
    for node in reversed(nodes):
        if tree.children[node]:
            below = [grown.pop(child) for child in tree.children[node]]
            parts = [part for found in below for part in found]
            # Parts of one child cannot be joined: with few others there is little to choose.
            others = len(parts) - max(map(len, below))
            bins = fill_bins(
                [part.tokens for part in parts], budget - tree.end(node), is_quick=others < _CHOICE
            )
            parts = [_join([parts[index] for index in members]) for members in bins]
        else:
            parts = [Part([node], 0)] if tree.end(node) <= budget else []
        for part in parts:
            part.tokens += tree.lengths[node]
        grown[node] = parts
    return grown[nodes.start]


def _join(parts: list[Part]) -> Part:
    into = max(parts, key=lambda part: len(part.leaves))
    for part in parts:
        if part is not into:
            into.leaves.extend(part.leaves)
            into.tokens += part.tokens
    return into


def _least(tree: NeededTree, nodes: range, budget: int) -> int:
    """By induction from the leaves: the parts that hold a node hold, besides the path down to it,
    at least all that its children need, and a part that holds a child holds the node. Leaves that
    are too deep stand alone and are added as they are."""
    needed = dict.fromkeys(nodes, 0)
    """Tokens that the parts together hold below the node."""
    times = dict.fromkeys(nodes, 0)
    """Parts that hold something below the node."""
    total = alone = 0
    for node in reversed(nodes):
        end = tree.end(node)
        if not tree.children[node]:
            times[node] = int(end <= budget)
            alone += end * (end > budget)
        elif needed[node]:
            times[node] = max(times[node], -(-needed[node] // (budget - end)))
        total = needed[node] + tree.lengths[node] * times[node]
        if node != nodes.start:
            needed[tree.parents[node]] += total
            times[tree.parents[node]] = max(times[tree.parents[node]], times[node])
    return total + alone


@dataclass(slots=True)
class _Search:
    """Step 3: deal out the leaves, deepest first, to the parts there are or to a new one."""

    tree: NeededTree
    budget: int
    floor: int
    best: list[Part]
    best_tokens: int = 0
    steps: int = 0
    parts: list[Part] = field(default_factory=list)
    covered: list[set[int]] = field(default_factory=list)
    """Nodes of each part."""
    times: dict[int, int] = field(default_factory=dict)
    """Parts that hold a node."""
    missing: int = 0
    """Tokens of nodes that no part holds yet."""

    def run(self, leaves: list[int]) -> list[Part]:
        self.best_tokens = sum(part.tokens for part in self.best)
        order = sorted(leaves, key=lambda leaf: (-self.tree.end(leaf), leaf))
        nodes = {node for leaf in leaves for node in self._new_nodes(leaf, set())}
        self.missing = sum(self.tree.lengths[node] for node in nodes)
        self._deal(order, 0, 0)
        return self.best

    def _new_nodes(self, leaf: int, there: set[int]) -> list[int]:
        """Nodes on the path of a leaf that are not `there`, from the leaf up."""
        nodes, node = [], leaf
        while node >= 0 and node not in there:
            nodes.append(node)
            node = self.tree.parents[node]
        return nodes

    def _deal(self, order: list[int], at: int, tokens: int) -> None:
        if tokens + self.missing >= self.best_tokens or self.best_tokens == self.floor:
            return
        if at == len(order):
            self.best = [Part(list(part.leaves), part.tokens) for part in self.parts]
            self.best_tokens = tokens
            return
        for index in range(len(self.parts) + 1):
            if self.steps >= SEARCH_STEPS:
                return
            self.steps += 1
            self._try(order, at, tokens, index)

    def _try(self, order: list[int], at: int, tokens: int, index: int) -> None:
        is_new = index == len(self.parts)
        if is_new:
            self.parts.append(Part([], 0))
            self.covered.append(set())
        part = self.parts[index]
        nodes = self._new_nodes(order[at], self.covered[index])
        more = sum(self.tree.lengths[node] for node in nodes)
        if is_new or part.tokens + more <= self.budget:
            self._put(index, order[at], nodes, more)
            self._deal(order, at + 1, tokens + more)
            self._take_back(index, nodes, more)
        if is_new:
            self.parts.pop()
            self.covered.pop()

    def _put(self, index: int, leaf: int, nodes: list[int], more: int) -> None:
        self.parts[index].leaves.append(leaf)
        self.parts[index].tokens += more
        self.covered[index].update(nodes)
        for node in nodes:
            self.times[node] = self.times.get(node, 0) + 1
            if self.times[node] == 1:
                self.missing -= self.tree.lengths[node]

    def _take_back(self, index: int, nodes: list[int], more: int) -> None:
        self.parts[index].leaves.pop()
        self.parts[index].tokens -= more
        self.covered[index].difference_update(nodes)
        for node in nodes:
            self.times[node] -= 1
            if self.times[node] == 0:
                self.missing += self.tree.lengths[node]
