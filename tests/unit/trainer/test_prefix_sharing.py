"""Laws of the pass plan: each occurrence under exactly its own prefix, whatever is shared."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.trainer.prefix_sharing import Pass, plan_passes
from polar.trainer.rows import Branch

pytestmark = pytest.mark.torch


@dataclass
class Trained:
    """What a generated branch trains: (occurrence, tokens up to its source), and its whole path."""

    branch: Branch
    path: list[int]

    @property
    def expected(self) -> dict[int, list[int]]:
        of_source = zip(self.branch.occurrences.tolist(), self.branch.sources.tolist(), strict=True)
        return {occurrence: self.path[:depth] for occurrence, depth in of_source}


@st.composite
def forests(draw: st.DrawFn) -> list[Trained]:
    """Branches over three tokens, so that common prefixes and equal branches abound."""
    made: list[Trained] = []
    count = 0
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.integers(-1, len(made) - 1))
        above = made[parent].path if parent >= 0 else []
        depth = draw(st.integers(1, len(above))) if above else 0
        tokens = draw(st.lists(st.integers(0, 2), min_size=1 if above else 2, max_size=9))
        path = [*above[:depth], *tokens]
        least = 0 if made else 1
        sources = draw(st.sets(st.integers(depth + 1, len(path)), min_size=least))
        occurrences = np.arange(count, count + len(sources))
        count += len(sources)
        branch = Branch(
            np.array(tokens), parent, depth, np.array(sorted(sources), dtype=np.int64), occurrences
        )
        made.append(Trained(branch, path))
    return made


def plan(made: list[Trained], limit: int) -> list[Pass]:
    return plan_passes([each.branch for each in made], limit)


def prefixes(plan: Pass) -> dict[int, list[int]]:
    """Occurrence → the tokens that its prediction depends on, as the plan computes it."""
    assert sum(plan.segment_lengths) == len(plan.tokens) == len(plan.positions)
    assert len(plan.segment_lengths) == len(plan.path_lengths)
    seen: dict[int, list[int]] = {}  # offset in the pass → its whole prefix
    start, key = 0, 0
    for length, keys in zip(plan.segment_lengths, plan.path_lengths, strict=True):
        path = plan.paths[key : key + keys].tolist()
        assert path[-length:] == list(range(start, start + length)), "a segment ends its own path"
        for i in range(length):
            at = path[: keys - length + i + 1]
            seen[start + i] = plan.tokens[at].tolist()
            assert plan.positions[start + i] == len(at) - 1
            assert plan.positions[at].tolist() == list(range(len(at)))
        start, key = start + length, key + keys
    return {int(o): seen[int(s)] for o, s in zip(plan.occurrences, plan.sources, strict=True)}


@settings(max_examples=300, deadline=None)
@given(forests(), st.integers(1, 40))
def test_every_occurrence_once_under_exactly_its_prefix(made: list[Trained], limit: int) -> None:
    found: dict[int, list[int]] = {}
    for one in plan(made, limit):
        mine = prefixes(one)
        assert len(mine) == len(one.occurrences)
        assert not mine.keys() & found.keys()
        found |= mine
    assert found == {key: value for each in made for key, value in each.expected.items()}


@settings(max_examples=100, deadline=None)
@given(forests(), st.integers(1, 40))
def test_a_branch_or_its_whole_path_as_a_sequence_is_the_same_to_the_plan(
    made: list[Trained], limit: int
) -> None:
    """Rows of another builder carry the same prefixes cut otherwise."""
    whole = [
        Branch(np.array(each.path), -1, 0, each.branch.sources, each.branch.occurrences) for each in made
    ]
    for left, right in zip(plan(made, limit), plan_passes(whole[::-1], limit), strict=True):
        assert np.array_equal(left.tokens, right.tokens)
        assert np.array_equal(left.paths, right.paths)
        assert sorted(left.occurrences) == sorted(right.occurrences)


@settings(max_examples=100, deadline=None)
@given(forests(), st.integers(1, 40))
def test_a_pass_stays_in_its_budget_unless_one_branch_alone_is_over(made: list[Trained], limit: int) -> None:
    for one in plan(made, limit):
        assert len(one.tokens) <= limit or len(one.segment_lengths) == 1


@settings(max_examples=100, deadline=None)
@given(forests())
def test_one_pass_computes_each_distinct_prefix_once(made: list[Trained]) -> None:
    (one,) = plan(made, 10_000)
    sources = [path for each in made for path in each.expected.values()]
    distinct = {tuple(path[: size + 1]) for path in sources for size in range(len(path))}
    assert len(one.tokens) == len(distinct)
