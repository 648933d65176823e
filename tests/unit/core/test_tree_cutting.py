"""Cuts of a tree into rows against every cut that there is."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.core.needed_tree import NeededTree
from polar.core.tree_cutting import EXACT_LEAVES, Part, _grow, cut, least_tokens
from tests.unit.core.small_trees import small_trees, whole_tree

EXHAUSTIVE = settings(max_examples=300, deadline=None)


def path(tree: NeededTree, leaf: int) -> list[int]:
    nodes = [leaf]
    while tree.parents[nodes[-1]] >= 0:
        nodes.append(tree.parents[nodes[-1]])
    return nodes


def size(tree: NeededTree, leaves: list[int]) -> int:
    return sum(tree.lengths[node] for node in {node for leaf in leaves for node in path(tree, leaf)})


def leaves_of(tree: NeededTree) -> list[int]:
    return [node for node in range(len(tree)) if not tree.children[node]]


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to deal out the items."""
    if not items:
        yield []
        return
    for smaller in partitions(items[1:]):
        yield [[items[0]], *smaller]
        for at in range(len(smaller)):
            yield [*smaller[:at], [items[0], *smaller[at]], *smaller[at + 1 :]]


def optimum(tree: NeededTree, budget: int) -> int:
    """Least tokens over all partitions of the leaves."""
    return min(
        sum(size(tree, part) for part in parts)
        for parts in partitions(leaves_of(tree))
        if all(size(tree, part) <= budget or len(part) == 1 for part in parts)
    )


def check(tree: NeededTree, parts: list[Part], budget: int) -> int:
    """Tokens of a valid cut."""
    assert sorted(leaf for part in parts for leaf in part.leaves) == leaves_of(tree)
    for part in parts:
        assert part.tokens == size(tree, part.leaves)
        assert part.tokens <= budget or len(part.leaves) == 1
        assert len({path(tree, leaf)[-1] for leaf in part.leaves}) == 1, "one root"
    return sum(part.tokens for part in parts)


@EXHAUSTIVE
@given(small_trees(roots=True), st.data())
def test_no_cut_of_a_small_tree_repeats_less(tree: NeededTree, data: st.DataObject) -> None:
    deepest = max(tree.end(leaf) for leaf in leaves_of(tree))
    budget = data.draw(st.integers(deepest, max(deepest, tree.num_tokens)))
    assert check(tree, cut(tree, budget), budget) == optimum(tree, budget)
    assert least_tokens(tree, budget) <= optimum(tree, budget)


@EXHAUSTIVE
@given(small_trees(max_leaves=6), st.integers(1, 12))
def test_a_leaf_deeper_than_the_budget_stands_alone(tree: NeededTree, budget: int) -> None:
    assert check(tree, cut(tree, budget), budget) == optimum(tree, budget)
    assert least_tokens(tree, budget) <= optimum(tree, budget)


def closed_sets(tree: NeededTree, budget: int) -> list[int]:
    """All sets of tokens (bits) with every ancestor and at most `budget` tokens."""
    above: list[int] = []
    for node in range(len(tree)):
        last = sum(tree.lengths[: tree.parents[node] + 1]) - 1 if tree.parents[node] >= 0 else -1
        for token in range(tree.lengths[node]):
            above.append(last if token == 0 else len(above) - 1)
    found = [0]
    for token, parent in enumerate(above):
        found += [s | 1 << token for s in found if s.bit_count() < budget and (parent < 0 or s >> parent & 1)]
    return found


def least_cover(tree: NeededTree, budget: int) -> int:
    """Least tokens over all collections of such sets that hold every token: runs may be cut inside."""
    sets = closed_sets(tree, budget)
    whole = (1 << tree.num_tokens) - 1
    least = {0: 0}
    for mask in range(whole + 1):
        if mask in least:
            missing = ~mask & whole
            lowest = missing & -missing
            for chosen in sets:
                if chosen & lowest:
                    cost = least[mask] + chosen.bit_count()
                    least[mask | chosen] = min(cost, least.get(mask | chosen, cost))
    return least[whole]


@settings(max_examples=150, deadline=None)
@given(small_trees(max_leaves=4, max_length=2), st.integers(0, 3))
def test_cutting_inside_a_run_never_repeats_less(tree: NeededTree, spare: int) -> None:
    if tree.num_tokens <= 9:
        budget = max(tree.end(leaf) for leaf in leaves_of(tree)) + spare
        assert check(tree, cut(tree, budget), budget) == least_cover(tree, budget)


@pytest.mark.parametrize("budget", range(8, 22))
def test_every_shape_of_a_star(budget: int) -> None:
    for lengths in itertools.product((1, 3, 5), repeat=4):
        tree = whole_tree([-1, 0, 0, 0, 0], [3, *lengths])
        assert check(tree, cut(tree, budget), budget) == optimum(tree, budget)


@pytest.mark.parametrize(
    ("parents", "lengths", "budget", "tokens"),
    [
        ([-1, 0, 1, 1, 0, 0], [10, 1, 4, 2, 6, 6], 21, 40),
        ([-1, 0, 1, 0, 3, 3, 0], [6, 8, 1, 2, 3, 4, 9], 22, 41),
        ([-1, 0, 1, 1, 1, 0, 5, 0], [3, 4, 6, 9, 4, 5, 5, 5], 25, 48),
        ([-1, 0, 1, 1, 3, 1, 5, 0, 7, 0], [5, 5, 6, 9, 9, 7, 8, 1, 5, 8], 37, 73),
    ],
)
def test_the_search_finds_what_growing_misses(
    parents: list[int], lengths: list[int], budget: int, tokens: int
) -> None:
    """Branches that are packed together early leave no room for others beside them."""
    tree = whole_tree(parents, lengths)
    assert check(tree, cut(tree, budget), budget) == optimum(tree, budget) == tokens
    grown = _grow(tree, range(len(tree)), budget)
    assert sum(part.tokens for part in grown) > tokens


def test_large_trees_stay_near_the_bound() -> None:
    lengths = [(7 * at * at) % 97 + 20 for at in range(400)]
    tree = whole_tree([-1] + [0] * 400, [500, *lengths])
    tokens = check(tree, cut(tree, 2_000), 2_000)
    assert len(leaves_of(tree)) > EXACT_LEAVES
    assert tokens <= 1.01 * least_tokens(tree, 2_000)


@pytest.mark.parametrize("spare", [50, 300])
def test_a_caterpillar_of_two_thousand_branches_repeats_its_shallow_end(spare: int) -> None:
    """A long chain with a stub at every step: stubs near the root move, those at the end stay."""
    parents, lengths, chain = [-1], [10], 0
    for _ in range(2_000):
        parents += [chain, chain]
        lengths += [1, 10]
        chain = len(parents) - 1
    tree = whole_tree(parents, lengths)
    budget = tree.end(chain) + spare
    assert check(tree, cut(tree, budget), budget) <= 1.001 * least_tokens(tree, budget)
