"""Bins, rows and ranks: nothing lost, nothing too full, against plain loops."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.core.bin_filling import EXACT_WEIGHTS, fill_bins, fullest
from polar.core.needed_tree import NeededTree
from polar.core.rank_shares import rank_rows, row_work
from polar.core.row_filling import MAX_REPEATED, fill_rows
from polar.core.tree_cutting import cut
from polar.core.tree_layout import lay_out
from schemas.batches import BatchManifest
from schemas.columns import TokenColumn
from tests.unit.core.small_trees import small_trees, tree_paths, whole_tree

LAWS = settings(max_examples=200, deadline=None)


@LAWS
@given(st.lists(st.integers(1, 30), max_size=9), st.integers(0, 60))
def test_the_fullest_subset_is_the_fullest(weights: list[int], room: int) -> None:
    taken = fullest(weights, room)
    assert taken == sorted(set(taken))
    sums = [
        sum(weights[index] for index in chosen)
        for size in range(len(weights) + 1)
        for chosen in itertools.combinations(range(len(weights)), size)
    ]
    assert sum(weights[index] for index in taken) == max(total for total in sums if total <= room)


def test_many_weights_fill_nearly_all_of_the_room() -> None:
    weights = [(7919 * at) % 901 + 100 for at in range(3 * EXACT_WEIGHTS)]
    taken = fullest(weights, 60_000)
    assert len(set(taken)) == len(taken)
    assert 59_900 < sum(weights[index] for index in taken) <= 60_000


@LAWS
@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 50))
def test_bins_hold_every_weight_once_and_no_two_could_be_one(weights: list[int], room: int) -> None:
    bins = fill_bins(weights, room)
    assert sorted(index for each in bins for index in each) == list(range(len(weights)))
    sums = [sum(weights[index] for index in each) for each in bins]
    assert all(total <= room or len(each) == 1 for total, each in zip(sums, bins, strict=True))
    assert all(one + other > room for one, other in itertools.combinations(sums, 2))


@LAWS
@given(small_trees(max_leaves=12, roots=True), st.integers(1, 40))
def test_rows_hold_every_leaf_once_and_repeat_little_beyond_the_cut(tree: NeededTree, budget: int) -> None:
    rows = fill_rows(tree, budget)
    leaves = [node for node in range(len(tree)) if not tree.children[node]]
    assert sorted(leaf for row in rows for leaf in row.leaves) == leaves
    for row in rows:
        assert row.tokens == sum(tree.lengths[node] for node in tree.covered(row.leaves))
        assert row.tokens <= budget or len(row.leaves) == 1
    tokens = sum(row.tokens for row in rows)
    assert tokens <= (1 + MAX_REPEATED) * sum(part.tokens for part in cut(tree, budget))


def test_a_row_is_given_up_where_its_branches_fill_the_gaps_of_others() -> None:
    """Two trees with long branches leave gaps; the third one's short branches fit them."""
    parents = [-1, *[0] * 4, -1, *[5] * 4, -1, *[10] * 8]
    lengths = [1, *[450] * 4, 1, *[450] * 4, 1, *[48] * 8]
    tree = whole_tree(parents, lengths)
    parts = cut(tree, 1_000)
    assert [part.tokens for part in parts] == [901, 901, 901, 901, 385]
    assert [row.tokens for row in fill_rows(tree, 1_000)] == [998, 998, 998, 998]


@LAWS
@given(small_trees(max_leaves=9, roots=True))
def test_a_layout_has_each_path_in_its_place(tree: NeededTree) -> None:
    paths = tree_paths(tree.parents, tree.lengths)
    layout = lay_out(tree, paths)
    leaves = [node for node in range(len(tree)) if not tree.children[node]]
    assert len(layout.segment_starts) - 1 == len(leaves)
    assert sorted(layout.tokens) == list(range(tree.num_tokens))
    assert max(map(len, layout.ancestors)) <= len(leaves).bit_length() - 1
    for node in range(len(tree)):
        path = paths.path(*tree.place(node))
        offsets = layout.offsets(node, np.arange(len(path)))
        assert layout.tokens[offsets].tolist() == path.tolist()
        assert layout.positions[offsets].tolist() == list(range(len(path)))
    for segment, keys in enumerate(layout.paths()):
        assert layout.positions[keys].tolist() == list(range(len(keys)))
        assert keys[-1] == layout.segment_starts[segment + 1] - 1


def manifest(lengths: list[int], pairs: list[int]) -> BatchManifest:
    return BatchManifest(
        policy="p",
        number=0,
        groups=(),
        live_groups=(),
        policy_version=None,
        builder="prefix_tree",
        row_tokens=100,
        row_count=len(lengths),
        rows_digest="",
        row_lengths=TokenColumn(lengths),
        row_pairs=tuple(pairs),
        live_rollouts=0,
        trained_tokens=0,
        algorithm="by hand",
    )


@LAWS
@given(st.lists(st.integers(1, 1000), max_size=7), st.integers(1, 4))
def test_ranks_share_the_rows_with_nearly_the_least_work(lengths: list[int], ranks: int) -> None:
    batch = manifest(lengths, [length * (length + 1) // 2 for length in lengths])
    work = row_work(batch, 100)
    shares = rank_rows(batch, ranks, 100)
    assert sorted(row for share in shares for row in share) == list(range(len(lengths)))
    assert len(shares) == ranks
    best = min(
        max(sum(w for w, rank in zip(work, chosen, strict=True) if rank == at) for at in range(ranks))
        for chosen in itertools.product(range(ranks), repeat=len(lengths))
    )
    assert max(sum(work[row] for row in share) for share in shares) <= 4 / 3 * best


def test_no_rank_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        rank_rows(manifest([1], [1]), 0)
