"""Branches of rows → passes through the model in which a common prefix is computed once.

A hidden state depends on the tokens up to its position and on nothing else, so branches that
begin alike share those states, whichever rows and groups carried them. All branches are merged into
one tree, cut down to the tokens that something is predicted after, and cut into passes as the packer
cuts a tree into rows: with the least repeated ancestors.

Invariant: every occurrence is predicted under exactly the tokens of its own branch. What is
computed is a function of the set of branches, not of the rows that carried them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polar.core.bin_filling import fill_bins
from polar.core.needed_tree import NeededTree, Place, needed_tree
from polar.core.prefix_tree import PrefixTree, TreePaths, TreePosition
from polar.core.row_reading import Ints
from polar.core.tree_cutting import cut
from polar.core.tree_layout import lay_out
from polar.trainer.rows import Branch


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass over t tokens in s segments with n occurrences.

    A segment is a run of neighbouring tokens; it attends to its path (the tokens of its
    branch before it) and causally to itself.
    """

    tokens: Ints
    """[t] ids."""
    positions: Ints
    """[t] tokens before each in its branch."""
    segment_lengths: list[int]
    """[s] tokens of each segment; the sum is t."""
    path_lengths: list[int]
    """[s] keys of each segment, itself included."""
    paths: Ints
    """[sum of path_lengths] offsets in the pass of each segment's keys, in order."""
    sources: Ints
    """[n] offset in the pass whose hidden state predicts the target."""
    occurrences: Ints
    """[n] rows of `Occurrences`."""


@dataclass(frozen=True, slots=True)
class _Trained:
    """The occurrences of one branch in the merged tree."""

    end: Place
    """Of the path to its deepest source."""
    depths: Ints
    """[n] of the sources' tokens."""
    occurrences: Ints
    """[n]."""


def plan_passes(branches: Sequence[Branch], max_tokens: int) -> list[Pass]:
    """Passes of at most `max_tokens` tokens each; a longer branch gets a pass of its own.

    `branches`: a parent before its children.
    """
    paths, trained = _merge(branches)
    tree = needed_tree(paths, (each.end for each in trained))
    parts = cut(tree, max_tokens)
    bins = fill_bins([part.tokens for part in parts], max_tokens)
    pass_of = {
        leaf: at for at, members in enumerate(bins) for index in members for leaf in parts[index].leaves
    }
    node_of = {run: node for node, run in enumerate(tree.runs)}
    leaves = tree.first_leaves()
    held: list[list[_Trained]] = [[] for _ in bins]
    for each in trained:
        held[pass_of[leaves[node_of[each.end[0]]]]].append(each)
    ends: list[list[Place]] = [[] for _ in bins]
    for leaf, at in pass_of.items():
        ends[at].append(tree.place(leaf))
    return [_pass(needed_tree(paths, own), paths, inside) for own, inside in zip(ends, held, strict=True)]


def _merge(branches: Sequence[Branch]) -> tuple[TreePaths, list[_Trained]]:
    """All branches in one tree, and where their occurrences lie in it, in the tree's order."""
    tree = PrefixTree()
    ends: list[TreePosition] = []
    for branch in branches:
        below = tree.root if branch.parent < 0 else tree.ancestor(ends[branch.parent], branch.depth)
        ends.append(tree.insert(branch.tokens.astype(np.int32), below))
    exported = tree.export()
    paths = TreePaths(exported.tree)
    trained = []
    for branch, end in zip(branches, ends, strict=True):
        if len(branch.sources):
            deepest = tree.ancestor(end, int(branch.sources.max()))
            trained.append(_Trained(exported.locate(deepest), branch.sources - 1, branch.occurrences))
    return paths, sorted(trained, key=lambda each: (each.end, int(each.occurrences[0])))


def _pass(tree: NeededTree, paths: TreePaths, trained: Sequence[_Trained]) -> Pass:
    layout = lay_out(tree, paths)
    node_of = {run: node for node, run in enumerate(tree.runs)}
    keys = layout.paths()
    return Pass(
        tokens=layout.tokens.astype(np.int64),
        positions=layout.positions.astype(np.int64),
        segment_lengths=np.diff(layout.segment_starts).tolist(),
        path_lengths=[len(path) for path in keys],
        paths=np.concatenate(keys),
        sources=np.concatenate([layout.offsets(node_of[each.end[0]], each.depths) for each in trained]),
        occurrences=np.concatenate([each.occurrences for each in trained]),
    )
