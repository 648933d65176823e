"""The part of a token tree that some paths cover: what a trainer has to compute.

Invariant: nodes are numbered depth first, so a parent comes before its children; each node is the
head of a run, a whole run where anything below it is covered.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from polar.core.prefix_tree import TreePaths

Place = tuple[int, int]
"""(run, tokens of it): where a path ends in a TokenTree; (-1, 0) is the empty path."""


@dataclass(frozen=True, slots=True)
class NeededTree:
    """n nodes."""

    runs: list[int]
    """[n] run of the TokenTree that the node is the head of."""
    parents: list[int]
    """[n] -1 for a root."""
    lengths: list[int]
    """[n] tokens."""
    depths: list[int]
    """[n] tokens on the path above."""
    children: list[list[int]]
    """[n] in order."""

    def __len__(self) -> int:
        return len(self.runs)

    def end(self, node: int) -> int:
        """Tokens on the path up to and including a node."""
        return self.depths[node] + self.lengths[node]

    @property
    def num_tokens(self) -> int:
        """Distinct (prefix, token) pairs."""
        return sum(self.lengths)

    def roots(self) -> list[int]:
        """Nodes without a parent."""
        return [node for node, parent in enumerate(self.parents) if parent < 0]

    def place(self, node: int) -> Place:
        """Where the path that ends with a node ends."""
        return self.runs[node], self.lengths[node]

    def covered(
        self, nodes: Iterable[int], *, above: int = -1, but: AbstractSet[int] = frozenset()
    ) -> set[int]:
        """The nodes on the paths down to `nodes`, those below `above` and not in `but`, which holds
        whole paths."""
        found: set[int] = set()
        for node in nodes:
            at = node
            while at != above and at >= 0 and at not in found and at not in but:
                found.add(at)
                at = self.parents[at]
        return found

    def first_leaves(self) -> list[int]:
        """[n] the first leaf at or below each node."""
        found = list(range(len(self)))
        for node in range(len(self) - 1, -1, -1):
            if self.children[node]:
                found[node] = found[self.children[node][0]]
        return found

    def branch_heads(self, tokens: int) -> list[int]:
        """[n] the topmost node at or above each whose whole branch is at most `tokens` large; the node
        itself without one."""
        sizes = list(self.lengths)
        for node in range(len(self) - 1, -1, -1):
            if self.parents[node] >= 0:
                sizes[self.parents[node]] += sizes[node]
        heads = list(range(len(self)))
        for node, parent in enumerate(self.parents):
            if parent >= 0 and sizes[heads[parent]] <= tokens:
                heads[node] = heads[parent]
        return heads


def needed_tree(paths: TreePaths, ends: Iterable[Place]) -> NeededTree:
    """What the paths that end at `ends` cover; time in proportion to the runs that they touch."""
    extents: dict[int, int] = {}
    for end in ends:
        run, extent = end
        while run >= 0 and extents.get(run, 0) < extent:
            extents[run] = extent
            run = paths.parents[run]
            extent = paths.length(run) if run >= 0 else 0
    runs = sorted(extents)
    nodes = {run: node for node, run in enumerate(runs)}
    parents = [nodes.get(paths.parents[run], -1) for run in runs]
    children: list[list[int]] = [[] for _ in runs]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    return NeededTree(
        runs=runs,
        parents=parents,
        lengths=[extents[run] for run in runs],
        depths=[paths.depths[run] for run in runs],
        children=children,
    )
