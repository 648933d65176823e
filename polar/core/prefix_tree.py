"""A token-prefix radix tree: insert sequences, export the canonical `TokenTree`, read paths.

Invariants: the export is a pure function of the set of inserted sequences (whatever their
order); a position stays valid whatever is inserted later; inserting below a known position costs
time in proportion to the tokens that are given, not to the path above it. Nothing is copied: the
growing tree holds views of what it was given.
"""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.columns import Column, TokenColumn
from schemas.trees import TokenTree, TreeMedia

Tokens = npt.NDArray[np.int32]
"""[n] token ids."""

_highest = np.maximum.reduce
HIGHEST_ID = 2**31 - 1
"""What a column holds at most; in `highest_id` negative ids lie above it."""
_WIRE = np.dtype("<i4")
_IS_LITTLE = np.dtype(np.int32) == _WIRE
_FIRST_COMPARE = 256
"""Tokens that are compared at once at first; most sequences part early."""


def as_tokens(ids: Column[int] | Sequence[int]) -> Tokens:
    """[n] int32 array of token ids; a column is viewed without a copy."""
    if isinstance(ids, Column):
        packed = np.frombuffer(ids.data, dtype=_WIRE)
        return packed if _IS_LITTLE else packed.astype(np.int32)
    return np.asarray(ids, dtype=np.int32)


def as_column(tokens: Tokens) -> TokenColumn:
    """The wire column of an int32 array."""
    return TokenColumn.from_bytes(np.ascontiguousarray(tokens, dtype="<i4").tobytes())


def highest_id(*columns: Column[int]) -> int:
    """The highest id, 0 of none; a negative one counts as that much below 2**32."""
    packed = b"".join(column.data for column in columns)
    return int(_highest(np.frombuffer(packed, dtype="<u4"))) if packed else 0


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Number of equal leading tokens; time in proportion to it."""
    size = min(len(left), len(right))
    at, step = 0, _FIRST_COMPARE
    while at < size:
        end = min(at + step, size)
        differs = left[at:end] != right[at:end]
        first = int(differs.argmax())
        if differs[first]:
            return at + first
        at, step = end, 4 * step
    return size


class _Node:
    """A run that was inserted as one piece; never cut. Branches hang at any offset of it."""

    __slots__ = ("branches", "depth", "jump", "keys", "level", "parent")

    def __init__(self, parent: "_Node | None", keys: Tokens, depth: int) -> None:
        self.parent = parent
        self.keys = keys
        """Tokens; a negative one names an entry of the tree's marks."""
        self.depth = depth
        """Tokens on the path above this run."""
        self.branches: dict[int, dict[int, _Node]] = {}
        """Offset in this run (1 .. its length; 0 for the root) → first key → what goes on there."""
        self.level: int = parent.level + 1 if parent is not None else 0
        self.jump = _jump(parent) if parent is not None else self
        """A far ancestor: any ancestor is found in a number of steps logarithmic in the level."""

    @property
    def end(self) -> int:
        return self.depth + len(self.keys)


class TreePosition(NamedTuple):
    """A place in a growing tree: the first `depth` tokens of the path through `node`."""

    node: _Node
    depth: int


Mark = tuple[int, str]
"""(token id, digest of the picture or sound behind it; "" for none)."""


class PrefixTree:
    """A growing trie over token sequences; a token with media behind it is told apart by digest."""

    def __init__(self) -> None:
        self._root = _Node(None, np.empty(0, dtype=np.int32), 0)
        self._marks: list[Mark] = []
        self._mark_keys: dict[Mark, int] = {}

    @property
    def root(self) -> TreePosition:
        """The empty prefix."""
        return TreePosition(self._root, 0)

    def keys(
        self, tokens: Tokens, media: Sequence[tuple[int, str]] = (), *, has_negative: bool = False
    ) -> Tokens:
        """What the tree compares: the tokens, with a key of its own for each that stands for media.

        `media`: (index into `tokens`, digest). `has_negative`: some ids are below 0. The tree keeps
        views of the keys: never change them.
        """
        marks = {at: (int(tokens[at]), digest) for at, digest in media} if media else {}
        if has_negative:  # no token of any vocabulary, but kept as it is
            odd = np.flatnonzero(tokens < 0).tolist()
            marks = {at: (int(tokens[at]), "") for at in odd} | marks
        if not marks:
            return tokens
        keys = tokens.copy()
        for at, mark in marks.items():
            key = self._mark_keys.setdefault(mark, -1 - len(self._marks))
            if key == -1 - len(self._marks):
                self._marks.append(mark)
            keys[at] = key
        return keys

    def ancestor(self, position: TreePosition, depth: int) -> TreePosition:
        """The position `depth` tokens deep on the path of `position`.

        Raises ValueError when the path is shorter.
        """
        if not 0 <= depth <= position.depth:
            raise ValueError(f"a path of {position.depth} tokens has no depth {depth}")
        return TreePosition(_covering(position.node, depth), depth)

    def insert(self, keys: Tokens, below: TreePosition | None = None) -> TreePosition:
        """Insert `keys` after `below` (default: the root); returns where they end."""
        start = below or self.root
        node, depth = _covering(start.node, start.depth), start.depth
        at, size = 0, len(keys)
        while at < size:
            offset = depth - node.depth
            if offset < len(node.keys):
                same = common_prefix(node.keys[offset:], keys[at:])
                at, depth, offset = at + same, depth + same, offset + same
                if at == size:
                    break
            branches = node.branches.setdefault(offset, {})
            first = int(keys[at])
            child = branches.get(first)
            if child is None:
                branches[first] = child = _Node(node, keys[at:], depth)
                return TreePosition(child, child.end)
            node = child
        return TreePosition(node, depth)

    def insert_tree(self, tree: TokenTree) -> "TreeMap":
        """Merge a whole tree into this one; the map places its positions here."""
        starts, parents = tree.starts.tolist(), tree.parents.tolist()
        tokens, media = as_tokens(tree.tokens), [(each.index, each.digest) for each in tree.media]
        keys = self.keys(tokens, media, has_negative=highest_id(tree.tokens) > HIGHEST_ID)
        ends: list[TreePosition] = []
        for run, parent in enumerate(parents):
            below = self.root if parent < 0 else ends[parent]
            ends.append(self.insert(keys[starts[run] : starts[run + 1]], below))
        return TreeMap(ends, [end - start for start, end in itertools.pairwise(starts)])

    def export(self) -> "ExportedTree":
        """The canonical tree: runs without branches joined, depth first, children by token and digest."""
        pieces: list[Tokens] = []
        parents: list[int] = []
        starts = [0]
        size = 0
        places: dict[_Node, list[_Piece]] = {}
        stack = self._below(_Cut(self._root, 0, [0], 0), -1)
        while stack:
            cut, above, opens_run = stack.pop()
            if opens_run:
                parents.append(above)
                starts.append(size)
            run = len(parents) - 1
            piece = cut.node.keys[cut.start : cut.end]
            places.setdefault(cut.node, []).append((cut.start, run, size - starts[-2]))
            pieces.append(piece)
            size += len(piece)
            starts[-1] = size
            stack += self._below(cut, run)
        tokens, media = self._columns(pieces)
        tree = TokenTree(parents=TokenColumn(parents), starts=TokenColumn(starts), tokens=tokens, media=media)
        return ExportedTree(tree, places)

    def _below(self, cut: "_Cut", run: int) -> "list[tuple[_Cut, int, bool]]":
        """What follows a piece, last child first: (piece, run above it, whether it opens a run)."""
        node, end = cut.node, cut.end
        children = node.branches.get(end)
        if children is None:
            return []
        ways = [(key, _Cut(child, 0, sorted(child.branches), 0)) for key, child in children.items()]
        if end < len(node.keys):
            ways.append((int(node.keys[end]), _Cut(node, end, cut.cuts, cut.at + 1)))
        if len(ways) == 1:
            return [(ways[0][1], run, run < 0)]
        ways.sort(key=lambda way: self._rank(way[0]), reverse=True)
        return [(way, run, True) for _, way in ways]

    def _rank(self, key: int) -> Mark:
        return (key, "") if key >= 0 else self._marks[-1 - key]

    def _columns(self, pieces: Sequence[Tokens]) -> tuple[TokenColumn, tuple[TreeMedia, ...]]:
        """The pieces' tokens in one column, and where media stand in it."""
        packed = b"".join(piece.astype("<i4", copy=False).data for piece in pieces)
        if not self._marks:
            return TokenColumn.from_bytes(packed), ()
        tokens = np.frombuffer(packed, dtype="<i4").copy()
        media = []
        for at in np.flatnonzero(tokens < 0).tolist():
            tokens[at], digest = self._marks[-1 - int(tokens[at])]
            if digest:
                media.append(TreeMedia(index=at, digest=digest))
        return as_column(tokens), tuple(media)


@dataclass(slots=True)
class _Cut:
    """A piece of a node on its way into the export."""

    node: _Node
    start: int
    cuts: list[int]
    """Offsets of the node's branches, ascending."""
    at: int
    """Index into `cuts` of where the piece ends."""

    @property
    def end(self) -> int:
        return self.cuts[self.at] if self.at < len(self.cuts) else len(self.node.keys)


_Piece = tuple[int, int, int]
"""(first offset in the node, run, offset of that token in the run)."""


@dataclass(frozen=True, slots=True)
class ExportedTree:
    """A canonical tree and where the positions of the growing one lie in it."""

    tree: TokenTree
    places: dict[_Node, list[_Piece]]
    """Node → its pieces, from its start to its end."""

    def locate(self, position: TreePosition) -> tuple[int, int]:
        """(end_run, end_offset) as in schemas.trees.StitchedCall; (-1, 0) for the root."""
        if position.depth == 0:
            return -1, 0
        node = _covering(position.node, position.depth)
        pieces, inside = self.places[node], position.depth - node.depth
        start, run, offset = pieces[bisect_left(pieces, (inside,)) - 1]
        return run, offset + inside - start


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
        self._levels: list[int] = []
        self._jumps: list[int] = []
        """[runs] a far ancestor, -1 for none: as in the growing tree."""
        for run, parent in enumerate(self.parents):
            self.depths.append(self.end_depth(parent) if parent >= 0 else 0)
            self._levels.append(self._levels[parent] + 1 if parent >= 0 else 0)
            self._jumps.append(self._jump(run))
        self.last = list(range(len(self.parents)))
        """[runs] highest run below each run, or itself: the runs below it are the numbers up to it."""
        for run in range(len(self.parents) - 1, -1, -1):
            parent = self.parents[run]
            if parent >= 0:
                self.last[parent] = max(self.last[parent], self.last[run])

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

    def stretch(self, place: tuple[int, int], start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the path that ends at `place`, as far as it goes."""
        run, offset = place
        stop = min(stop, self.depth(run, offset))
        if stop <= start:
            return np.empty(0, dtype=np.int32)
        run, offset = self.ancestor(run, offset, stop)
        pieces = []
        while run >= 0 and self.depths[run] + offset > start:
            first = max(0, start - self.depths[run])
            pieces.append(self.tokens[self.starts[run] + first : self.starts[run] + offset])
            run = self.parents[run]
            offset = self.length(run) if run >= 0 else 0
        return np.concatenate(pieces[::-1])

    def ancestor(self, end_run: int, end_offset: int, depth: int) -> tuple[int, int]:
        """(run, offset) of the path's first `depth` tokens; (-1, 0) for depth 0."""
        if depth == 0:
            return -1, 0
        if not 0 < depth <= self.depth(end_run, end_offset):
            raise ValueError(f"the path has no depth {depth}")
        run = end_run
        while self.depths[run] >= depth:
            far = self._jumps[run]
            run = far if far >= 0 and self.depths[far] >= depth else self.parents[run]
        return run, depth - self.depths[run]

    def _jump(self, run: int) -> int:
        parent = self.parents[run]
        far = self._jumps[parent] if parent >= 0 else -1
        if far < 0:
            return parent
        further = self._jumps[far]
        is_pair = further >= 0 and self._levels[parent] - self._levels[far] == (
            self._levels[far] - self._levels[further]
        )
        return further if is_pair else parent

    def is_prefix(self, upper: tuple[int, int], lower: tuple[int, int]) -> bool:
        """Whether the path that ends at `upper` is a prefix of (or equal to) that of `lower`."""
        if upper[0] < 0:
            return True
        if upper[0] == lower[0]:
            return upper[1] <= lower[1]
        return upper[0] < lower[0] <= self.last[upper[0]]


def _jump(parent: _Node) -> _Node:
    """Skew-binary jump pointers: far enough to be quick, near enough to be of use to every child."""
    far = parent.jump
    is_pair = parent.level - far.level == far.level - far.jump.level
    return far.jump if is_pair else parent


def _covering(node: _Node, depth: int) -> _Node:
    """The node on the path of `node` whose run holds the token at depth `depth` - 1."""
    while node.parent is not None and node.depth >= depth:
        node = node.jump if node.jump.depth >= depth else node.parent
    return node
