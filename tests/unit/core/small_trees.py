"""Small token trees for tests of cutting, laid out by hand or drawn."""

from collections.abc import Sequence

from hypothesis import strategies as st

from polar.core.needed_tree import NeededTree, needed_tree
from polar.core.prefix_tree import TreePaths
from schemas.columns import TokenColumn
from schemas.trees import TokenTree


def tree_paths(parents: Sequence[int], lengths: Sequence[int]) -> TreePaths:
    """Runs of these lengths in depth-first order; every token has an id of its own."""
    starts = [sum(lengths[:run]) for run in range(len(lengths) + 1)]
    return TreePaths(
        TokenTree(
            parents=TokenColumn(parents), starts=TokenColumn(starts), tokens=TokenColumn(range(starts[-1]))
        )
    )


def whole_tree(parents: Sequence[int], lengths: Sequence[int]) -> NeededTree:
    """The tree of these runs, all of them needed."""
    return needed_tree(tree_paths(parents, lengths), [(run, lengths[run]) for run in range(len(lengths))])


@st.composite
def small_trees(
    draw: st.DrawFn, *, max_leaves: int = 7, max_length: int = 9, roots: bool = False
) -> NeededTree:
    """Trees in depth-first order with at most `max_leaves` leaves; one root unless `roots`."""
    parents: list[int] = [-1]
    lengths = [draw(st.integers(1, max_length))]
    path = [0]
    for leaves in range(1, draw(st.integers(1, max_leaves)) + 1):
        while draw(st.booleans()) and len(parents) < 3 * max_leaves:
            _grow(draw, parents, lengths, path, max_length)
        if leaves > 1 or draw(st.booleans()):
            del path[draw(st.integers(0 if roots else 1, len(path))) :]
            _grow(draw, parents, lengths, path, max_length)
    tree = whole_tree(parents, lengths)
    leaves = sum(not children for children in tree.children)
    return tree if leaves <= max_leaves else whole_tree(parents[:1], lengths[:1])


def _grow(draw: st.DrawFn, parents: list[int], lengths: list[int], path: list[int], longest: int) -> None:
    parents.append(path[-1] if path else -1)
    lengths.append(draw(st.integers(1, longest)))
    path.append(len(parents) - 1)
