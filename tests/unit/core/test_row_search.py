"""Giving rows up by search: nothing lost, nothing too full, and the same rows on every machine."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.core import row_search
from polar.core.bin_filling import fill_bins
from polar.core.needed_tree import NeededTree
from polar.core.row_search import with_fewer_rows
from polar.core.tree_cutting import Part, cut, least_tokens
from tests.unit.core.small_trees import small_trees, whole_tree

BUDGET = 32_768


PLANTED = 16
SPARE = 300


def rollouts_of_tasks(seed: int) -> NeededTree:
    """Eight tasks behind one system prompt; PLANTED rows with rollouts of two tasks, SPARE tokens short."""
    draw = np.random.default_rng(seed)
    tasks = draw.integers(400, 1_200, 8).tolist()
    rollouts: list[list[int]] = [[] for _ in tasks]
    for row in range(PLANTED):
        pair = (row % 8, (row + 1 + row // 8) % 8)
        room = BUDGET - 3_000 - SPARE - sum(tasks[task] for task in pair)
        count = int(draw.integers(3, 5))
        inner = [int(room * (at + draw.uniform(-0.25, 0.25)) / count) for at in range(1, count)]
        for at, length in enumerate(np.diff([0, *inner, room]).tolist()):
            rollouts[pair[at % 2]].append(length)
    parents, lengths = [-1], [3_000]
    for task, below in zip(tasks, rollouts, strict=True):
        parents += [0, *[len(parents)] * len(below)]
        lengths += [task, *below]
    return whole_tree(parents, lengths)


def rows_by_bins(tree: NeededTree, budget: int) -> list[Part]:
    parts = [part for part in cut(tree, budget) if part.tokens <= budget]
    return [
        Part([leaf for at in members for leaf in parts[at].leaves], sum(parts[at].tokens for at in members))
        for members in fill_bins([part.tokens for part in parts], budget)
    ]


def searched(tree: NeededTree) -> tuple[list[Part], list[Part]]:
    before = rows_by_bins(tree, BUDGET)
    allowed = int(1.01 * sum(row.tokens for row in before))
    fewest = -(-least_tokens(tree, BUDGET) // BUDGET)
    return before, with_fewer_rows(tree, BUDGET, before, allowed=allowed, fewest=fewest)


@pytest.mark.parametrize("seed", range(4))
def test_a_planted_packing_is_found_where_bins_need_more_rows(seed: int) -> None:
    before, after = searched(rollouts_of_tasks(seed))
    assert len(before) > PLANTED
    assert len(after) == PLANTED


@settings(max_examples=150, deadline=None)
@given(small_trees(max_leaves=12, roots=True), st.integers(8, 40), st.integers(0, 30))
def test_each_leaf_is_in_one_row_within_budget_and_allowance(
    tree: NeededTree, budget: int, spare: int
) -> None:
    before = rows_by_bins(tree, budget)
    tokens = sum(row.tokens for row in before)
    after = with_fewer_rows(tree, budget, before, allowed=tokens + spare, fewest=1)
    assert sorted(leaf for row in after for leaf in row.leaves) == sorted(
        leaf for row in before for leaf in row.leaves
    )
    assert len(after) <= len(before)
    assert sum(row.tokens for row in after) <= tokens + spare
    for row in after:
        assert row.tokens == sum(tree.lengths[node] for node in tree.covered(row.leaves)) <= budget


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(9, 20))
def test_few_leaves_of_a_star_fill_as_few_rows_as_any_way_to_deal_them_out(
    weights: list[int], budget: int
) -> None:
    tree = whole_tree([-1] * len(weights), weights)
    alone = [Part([leaf], weight) for leaf, weight in enumerate(weights)]
    after = with_fewer_rows(tree, budget, alone, allowed=sum(weights), fewest=1)
    best = min(
        len(set(rows))
        for rows in itertools.product(range(len(weights)), repeat=len(weights))
        if all(sum(w for w, at in zip(weights, rows, strict=True) if at == row) <= budget for row in rows)
    )
    assert len(after) == best


def test_not_below_the_rows_that_are_known_to_be_the_fewest() -> None:
    tree = whole_tree([-1, -1, -1], [2, 2, 2])
    alone = [Part([leaf], 2) for leaf in range(3)]
    assert len(with_fewer_rows(tree, 6, alone, allowed=6, fewest=2)) == 2


def test_rows_and_odds_are_the_same_on_every_machine() -> None:
    """Replays compare batches by their bytes. A deliberate change of the search changes both digests,
    and polar.core.packing.ALGORITHM with them."""
    parents, lengths = [-1], [3_000]
    for task in range(8):
        parents += [0, *[len(parents)] * 8]
        lengths += [700 + 50 * task, *(5_000 + 7_921 * (8 * task + at) % 7_001 for at in range(8))]
    before, after = searched(whole_tree(parents, lengths))
    assert (len(before), len(after)) == (20, 19)
    odds = row_search._ODDS.astype("<i8").tobytes()
    leaves = repr([row.leaves for row in after]).encode()
    assert [hashlib.sha256(each).hexdigest()[:16] for each in (odds, leaves)] == [
        "250f1f08c195b5f8",
        "969b7eaec54bd958",
    ]
