"""A needed tree → one stretch of tokens in segments that attend to ancestors.

A segment is a whole branch: it begins where it leaves another one and ends at a leaf, so there are
as many segments as leaves. It follows, at each fork, the child with the most leaves; thereby
a token has at most log2(leaves) segments above its own. Ancestors lie before their segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polar.core.needed_tree import NeededTree
from polar.core.prefix_tree import Tokens, TreePaths

Ints = npt.NDArray[np.int64]
Range = tuple[int, int]
"""Offsets [start, end) in the layout."""


@dataclass(frozen=True, slots=True)
class Layout:
    """t tokens in s segments."""

    tokens: Tokens
    """[t] ids."""
    positions: Tokens
    """[t] tokens on the path above each."""
    segment_starts: list[int]
    """[s + 1] offsets of the segments; the last is t."""
    ancestors: list[tuple[Range, ...]]
    """[s] what each segment's first token attends to besides itself, from the root down; the
    lengths sum up to its position."""
    segment_of: list[int]
    """[nodes] segment in which a node of the tree lies."""

    def offsets(self, node: int, depths: Ints) -> Ints:
        """Where the tokens at `depths` [n] of the path through a node lie; the node's own segment
        must reach that deep."""
        segment = self.segment_of[node]
        begin, end = self.segment_starts[segment : segment + 2]
        pieces = np.array([*self.ancestors[segment], (begin, end)], dtype=np.int64)
        ends = np.cumsum(pieces[:, 1] - pieces[:, 0])
        at = np.searchsorted(ends, depths, side="right")
        found: Ints = pieces[at, 1] - (ends[at] - depths)
        return found

    def paths(self) -> list[Ints]:
        """[s] offsets of each segment's keys in order of depth, its own included."""
        return [
            np.concatenate([np.arange(*piece) for piece in (*ranges, (begin, end))])
            for ranges, begin, end in zip(
                self.ancestors, self.segment_starts, self.segment_starts[1:], strict=False
            )
        ]


def lay_out(tree: NeededTree, paths: TreePaths) -> Layout:
    """The layout of a needed tree, of which `paths` holds the tokens."""
    heavy = _heavy_children(tree)
    order: list[int] = []
    starts: list[int] = [0]
    ancestors: list[tuple[Range, ...]] = []
    segment_of = [0] * len(tree)
    size = 0
    stack: list[tuple[int, tuple[Range, ...]]] = [(root, ()) for root in reversed(tree.roots())]
    while stack:
        node, above = stack.pop()
        ancestors.append(above)
        begin = size
        light: list[tuple[int, tuple[Range, ...]]] = []
        while node >= 0:
            segment_of[node] = len(ancestors) - 1
            order.append(node)
            size += tree.lengths[node]
            here = (*above, (begin, size))
            light += [(child, here) for child in tree.children[node] if child != heavy[node]]
            node = heavy[node]
        starts.append(size)
        stack += reversed(light)
    lengths = np.array([tree.lengths[node] for node in order], dtype=np.int64)
    depths = np.array([tree.depths[node] for node in order], dtype=np.int64)
    first = np.cumsum(lengths) - lengths
    return Layout(
        tokens=_tokens(tree, order, paths),
        positions=(np.arange(size) + np.repeat(depths - first, lengths)).astype(np.int32),
        segment_starts=starts,
        ancestors=ancestors,
        segment_of=segment_of,
    )


def _heavy_children(tree: NeededTree) -> list[int]:
    """[nodes] the child with the most leaves, of equals the one with the deepest leaf; -1 at a leaf."""
    heavy = [-1] * len(tree)
    weights: list[tuple[int, int]] = [(1, tree.end(node)) for node in range(len(tree))]
    for node in range(len(tree) - 1, -1, -1):
        children = tree.children[node]
        if children:
            heavy[node] = max(children, key=lambda child: (weights[child], -child))
            leaves = sum(weights[child][0] for child in children)
            weights[node] = (leaves, max(weights[child][1] for child in children))
    return heavy


def _tokens(tree: NeededTree, order: Sequence[int], paths: TreePaths) -> Tokens:
    pieces = []
    for node in order:
        begin = paths.starts[tree.runs[node]]
        pieces.append(paths.tokens[begin : begin + tree.lengths[node]])
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
