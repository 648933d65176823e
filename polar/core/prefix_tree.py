"""A token-prefix radix tree: insert sequences, export the canonical `TokenTree`, read paths.

Invariants: the export is a pure function of the set of inserted sequences (whatever their
order); a position stays valid while later insertions split runs; inserting below a known
position costs time in proportion to the tokens that are given, not to the path above it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.columns import Column, TokenColumn
from schemas.trees import TokenTree

Tokens = npt.NDArray[np.int32]
"""[n] token ids."""


def as_tokens(ids: Column[int] | Sequence[int]) -> Tokens:
    """[n] int32 array of token ids; a column is viewed without a copy."""
    if isinstance(ids, Column):
        return np.frombuffer(ids.data, dtype="<i4").astype(np.int32, copy=False)
    return np.asarray(ids, dtype=np.int32)


def as_column(tokens: Tokens) -> TokenColumn:
    """The wire column of an int32 array."""
    return TokenColumn.from_bytes(np.ascontiguousarray(tokens, dtype="<i4").tobytes())


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Number of equal leading tokens."""
    size = min(len(left), len(right))
    differs = np.flatnonzero(left[:size] != right[:size])
    return int(differs[0]) if len(differs) else size


class _Node:
    """A run under construction. A split leaves this object the lower part, so that positions
    at the run's end stay where they are."""

    __slots__ = ("children", "depth", "parent", "tokens")

    def __init__(self, parent: "_Node | None", tokens: Tokens, depth: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.depth = depth
        """Tokens on the path above this run."""
        self.children: dict[int, _Node] = {}

    @property
    def end(self) -> int:
        return self.depth + len(self.tokens)


@dataclass(frozen=True, slots=True)
class TreePosition:
    """A place in a growing tree: the first `depth` tokens of the path through `node`."""

    node: _Node
    depth: int


class PrefixTree:
    """A growing trie over token sequences."""

    def __init__(self) -> None:
        self._root = _Node(None, np.empty(0, dtype=np.int32), 0)

    @property
    def root(self) -> TreePosition:
        """The empty prefix."""
        return TreePosition(self._root, 0)

    def ancestor(self, position: TreePosition, depth: int) -> TreePosition:
        """The position `depth` tokens deep on the path of `position`.

        Raises ValueError when the path is shorter.
        """
        if not 0 <= depth <= position.depth:
            raise ValueError(f"a path of {position.depth} tokens has no depth {depth}")
        return TreePosition(_covering(position.node, depth), depth)

    def insert(self, tokens: Tokens, below: TreePosition | None = None) -> TreePosition:
        """Insert `tokens` after `below` (default: the root); returns where they end."""
        start = below or self.root
        node, depth = _covering(start.node, start.depth), start.depth
        at = 0
        while at < len(tokens):
            if depth < node.end:  # inside a run: follow it, or split it where they part
                rest = node.tokens[depth - node.depth :]
                same = common_prefix(rest, tokens[at:])
                at, depth = at + same, depth + same
                if at < len(tokens) and depth < node.end:
                    node = _split(node, depth)
                continue
            child = node.children.get(int(tokens[at]))
            if child is None:
                child = _Node(node, tokens[at:].copy(), depth)
                node.children[int(tokens[at])] = child
                return TreePosition(child, child.end)
            node = child
        return TreePosition(node, depth)

    def insert_tree(self, tree: TokenTree) -> "TreeMap":
        """Merge a whole tree into this one; the map places its positions here."""
        starts, parents = tree.starts.tolist(), tree.parents.tolist()
        tokens = as_tokens(tree.tokens)
        ends: list[TreePosition] = []
        for run, parent in enumerate(parents):
            below = self.root if parent < 0 else ends[parent]
            ends.append(self.insert(tokens[starts[run] : starts[run + 1]], below))
        return TreeMap(ends, [end - start for start, end in itertools.pairwise(starts)])

    def export(self) -> "ExportedTree":
        """The canonical tree: runs without branches joined, depth first, children by token."""
        pieces: list[Tokens] = []
        parents: list[int] = []
        starts = [0]
        places: dict[_Node, tuple[int, int]] = {}
        stack = [(child, -1, True) for child in _ordered(self._root, reverse=True)]
        while stack:
            node, above, opens_run = stack.pop()
            if opens_run:
                parents.append(above)
                starts.append(starts[-1])
            run = len(parents) - 1
            places[node] = (run, starts[-1] - starts[-2])
            pieces.append(node.tokens)
            starts[-1] += len(node.tokens)
            children = _ordered(node, reverse=True)
            stack.extend((child, run, len(children) > 1) for child in children)
        tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
        tree = TokenTree(parents=TokenColumn(parents), starts=TokenColumn(starts), tokens=as_column(tokens))
        return ExportedTree(tree, places)


@dataclass(frozen=True, slots=True)
class ExportedTree:
    """A canonical tree and where the positions of the growing one lie in it."""

    tree: TokenTree
    places: dict[_Node, tuple[int, int]]
    """Node → (run, offset of the node's first token in that run)."""

    def locate(self, position: TreePosition) -> tuple[int, int]:
        """(end_run, end_offset) as in schemas.trees.StitchedCall; (-1, 0) for the root."""
        if position.depth == 0:
            return -1, 0
        node = _covering(position.node, position.depth)
        run, offset = self.places[node]
        return run, offset + position.depth - node.depth


@dataclass(frozen=True, slots=True)
class TreeMap:
    """Where the runs of a merged tree ended up."""

    ends: list[TreePosition]
    lengths: list[int]

    def locate(self, end_run: int, end_offset: int, into: PrefixTree) -> TreePosition:
        """The position here of (end_run, end_offset) there."""
        if end_run < 0:
            return into.root
        end = self.ends[end_run]
        return into.ancestor(end, end.depth - self.lengths[end_run] + end_offset)


class TreePaths:
    """Reads paths of an exported tree."""

    def __init__(self, tree: TokenTree) -> None:
        self.parents: list[int] = tree.parents.tolist()
        self.starts: list[int] = tree.starts.tolist()
        self.tokens = as_tokens(tree.tokens)
        self.depths: list[int] = []
        """[runs] tokens on the path above each run."""
        for parent in self.parents:
            self.depths.append(self.end_depth(parent) if parent >= 0 else 0)
        self._last = list(range(len(self.parents)))
        for run in range(len(self.parents) - 1, -1, -1):
            parent = self.parents[run]
            if parent >= 0:
                self._last[parent] = max(self._last[parent], self._last[run])

    def length(self, run: int) -> int:
        """Tokens of a run."""
        return self.starts[run + 1] - self.starts[run]

    def end_depth(self, run: int) -> int:
        """Tokens on the path up to and including a run."""
        return self.depths[run] + self.length(run)

    def depth(self, end_run: int, end_offset: int) -> int:
        """Length of the path that ends at (end_run, end_offset)."""
        return 0 if end_run < 0 else self.depths[end_run] + end_offset

    def path(self, end_run: int, end_offset: int) -> Tokens:
        """[depth] tokens of the path that ends at (end_run, end_offset)."""
        if end_run < 0:
            return np.empty(0, dtype=np.int32)
        pieces = [self.tokens[self.starts[end_run] : self.starts[end_run] + end_offset]]
        run = self.parents[end_run]
        while run >= 0:
            pieces.append(self.tokens[self.starts[run] : self.starts[run + 1]])
            run = self.parents[run]
        return np.concatenate(pieces[::-1])

    def head(self, end_run: int, end_offset: int, size: int) -> Tokens:
        """The first `size` tokens of a path, or all of a shorter one."""
        depth = min(size, self.depth(end_run, end_offset))
        return self.path(*self.ancestor(end_run, end_offset, depth))

    def ancestor(self, end_run: int, end_offset: int, depth: int) -> tuple[int, int]:
        """(run, offset) of the path's first `depth` tokens; (-1, 0) for depth 0."""
        if depth == 0:
            return -1, 0
        if not 0 < depth <= self.depth(end_run, end_offset):
            raise ValueError(f"the path has no depth {depth}")
        run = end_run
        while self.depths[run] >= depth:
            run = self.parents[run]
        return run, depth - self.depths[run]

    def is_prefix(self, upper: tuple[int, int], lower: tuple[int, int]) -> bool:
        """Whether the path that ends at `upper` is a prefix of (or equal to) that of `lower`."""
        if upper[0] < 0:
            return True
        if upper[0] == lower[0]:
            return upper[1] <= lower[1]
        return upper[0] < lower[0] <= self._last[upper[0]]


def _covering(node: _Node, depth: int) -> _Node:
    """The node on the path of `node` whose run holds the token at depth `depth` - 1."""
    while node.parent is not None and node.depth >= depth:
        node = node.parent
    return node


def _split(node: _Node, depth: int) -> _Node:
    """Cut a run at `depth`; returns the new upper part."""
    parent = node.parent
    if parent is None:
        raise ValueError("the root has no tokens to split")
    cut = depth - node.depth
    upper = _Node(parent, node.tokens[:cut], node.depth)
    parent.children[int(upper.tokens[0])] = upper
    node.tokens, node.depth, node.parent = node.tokens[cut:], depth, upper
    upper.children[int(node.tokens[0])] = node
    return upper


def _ordered(node: _Node, *, reverse: bool) -> list[_Node]:
    return [node.children[token] for token in sorted(node.children, reverse=reverse)]
