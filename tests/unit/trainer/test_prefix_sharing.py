"""Laws of the pass plan: each occurrence under exactly its own prefix, whatever is shared."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.trainer.prefix_sharing import Pass, plan_passes
from polar.trainer.rows import TrainedSequence

pytestmark = pytest.mark.torch


@st.composite
def sequence_sets(draw: st.DrawFn) -> list[TrainedSequence]:
    """Sequences over three tokens, so that common prefixes and equal sequences abound."""
    sequences, count = [], 0
    for _ in range(draw(st.integers(1, 12))):
        tokens = draw(st.lists(st.integers(0, 2), min_size=2, max_size=9))
        at = sorted(draw(st.sets(st.integers(0, len(tokens) - 2), min_size=1)))
        ids = np.arange(count, count + len(at))
        sequences.append(TrainedSequence(np.array(tokens), np.array(at), ids))
        count += len(at)
    return sequences


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
@given(sequence_sets(), st.integers(1, 40))
def test_every_occurrence_once_under_exactly_its_prefix(sequences: list[TrainedSequence], limit: int) -> None:
    passes = plan_passes(sequences, limit)
    found: dict[int, list[int]] = {}
    for plan in passes:
        mine = prefixes(plan)
        assert len(mine) == len(plan.occurrences)
        assert not mine.keys() & found.keys()
        found |= mine
    expected = {
        int(o): s.tokens[: source + 1].tolist()
        for s in sequences
        for source, o in zip(s.sources, s.occurrences, strict=True)
    }
    assert found == expected


@settings(max_examples=100, deadline=None)
@given(sequence_sets(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order(sequences: list[TrainedSequence], limit: int, random) -> None:
    shuffled = list(sequences)
    random.shuffle(shuffled)
    for left, right in zip(plan_passes(sequences, limit), plan_passes(shuffled, limit), strict=True):
        assert np.array_equal(left.tokens, right.tokens)
        assert np.array_equal(left.paths, right.paths)
        assert np.array_equal(left.occurrences, right.occurrences)


@settings(max_examples=100, deadline=None)
@given(sequence_sets(), st.integers(1, 40))
def test_a_pass_stays_in_its_budget_unless_one_sequence_alone_is_over(
    sequences: list[TrainedSequence], limit: int
) -> None:
    for plan in plan_passes(sequences, limit):
        assert len(plan.tokens) <= limit or len(plan.segment_lengths) == 1


@settings(max_examples=100, deadline=None)
@given(sequence_sets())
def test_one_pass_computes_each_distinct_prefix_once(sequences: list[TrainedSequence]) -> None:
    (plan,) = plan_passes(sequences, 10_000)
    distinct = {tuple(s.tokens[: i + 1].tolist()) for s in sequences for i in range(len(s.tokens))}
    assert len(plan.tokens) == len(distinct)
