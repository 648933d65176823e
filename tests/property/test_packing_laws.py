"""Laws of packing and of advantages over generated groups, against plain loops."""

import itertools
import math
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.core.advantages import AdvantageRule, advantages, credits_of_calls
from polar.core.packing import PackedBatch, pack
from polar.core.prefix_tree import TreePaths
from polar.core.stitching import stitch
from schemas.base import encode
from schemas.batches import Builder
from schemas.groups import ScoredGroup
from schemas.tasks import Estimator
from tests.property.session_scripts import LAWS, scripts
from tests.unit.core.occurrences import live_group, prefixes_in, trained_in

BUILDERS: list[Builder] = ["per_request", "prefix_merging", "prefix_tree"]


@st.composite
def groups(draw: st.DrawFn) -> list[ScoredGroup]:
    made = []
    for number in range(draw(st.integers(0, 3))):
        members = [
            draw(scripts(f"task{number}/{member}/0/1", max_calls=5))
            for member in range(draw(st.integers(1, 3)))
        ]
        trajectories = [stitch(m.records.opened, m.records.records, m.closing) for m in members]
        group = live_group(*trajectories, group_id=f"task{number}")
        made.append(group.model_copy(update={"live": draw(st.sampled_from([True, True, False]))}))
    return made


def packed(made: list[ScoredGroup], builder: Builder, row_tokens: int) -> PackedBatch:
    return pack(made, builder=builder, row_tokens=row_tokens, policy="p", batch_number=3)


def expected(made: list[ScoredGroup], row_tokens: int) -> tuple[Counter[object], Counter[str]]:
    """(occurrences, cut tokens a call) by the definition of ScoredGroup."""
    found: Counter[object] = Counter()
    cut: Counter[str] = Counter()
    for group in made:
        paths = TreePaths(group.tree)
        for call in group.calls:
            path = paths.path(call.end_run, call.end_offset).tolist()
            if not group.live or call.untrainable is not None:
                continue
            for index in range(call.sampled_tokens):
                depth = call.prompt_tokens + index
                if index in call.masked:
                    continue
                if depth >= row_tokens:
                    cut[call.call_id] += 1
                    continue
                found[call.call_id, index, tuple(path[:depth]), path[depth], call.logprobs[index]] += 1
    return found, cut


@LAWS
@given(groups(), st.sampled_from([4, 9, 64]))
def test_nothing_is_lost_or_doubled_and_rows_fit(made: list[ScoredGroup], row_tokens: int) -> None:
    found, cut = expected(made, row_tokens)
    for builder in BUILDERS:
        batch = packed(made, builder, row_tokens)
        assert trained_in(batch.rows) == found
        assert {item.id for item in batch.truncated} == set(cut)
        assert batch.trained_tokens == sum(found.values())
        assert [row.index for row in batch.rows] == list(range(len(batch.rows)))
        for row in batch.rows:
            assert 0 < len(row.tokens) <= row_tokens
            assert len(row.sources) > 0
            assert set(row.call_ordinals) == set(range(len(row.call_ids)))


@LAWS
@given(groups(), st.sampled_from([9, 64]))
def test_each_rollout_has_one_share_however_it_is_packed(made: list[ScoredGroup], row_tokens: int) -> None:
    for builder in BUILDERS:
        batch = packed(made, builder, row_tokens)
        shares: dict[str, float] = defaultdict(float)
        each: dict[str, set[float]] = defaultdict(set)
        signs: dict[str, set[float]] = defaultdict(set)
        for row in batch.rows:
            for weight, advantage, ordinal in zip(
                row.weights, row.advantages, row.call_ordinals, strict=True
            ):
                session_id = row.call_ids[ordinal].partition("#")[0]
                shares[session_id] += weight
                each[session_id].add(weight)
                signs[session_id].add(advantage)
        assert len(shares) == batch.live_rollouts
        for session_id, share in shares.items():
            assert share == pytest.approx(1 / batch.live_rollouts, rel=1e-5)
            assert len(each[session_id]) == len(signs[session_id]) == 1


@LAWS
@given(groups())
def test_packing_is_deterministic_to_the_byte(made: list[ScoredGroup]) -> None:
    for builder in BUILDERS:
        first, second = packed(made, builder, 16), packed(made, builder, 16)
        assert [encode(row) for row in first.rows] == [encode(row) for row in second.rows]
        assert first.metrics == second.metrics


@LAWS
@given(groups())
def test_merging_computes_no_more_sequences_than_leaves(made: list[ScoredGroup]) -> None:
    batch = packed(made, "prefix_merging", 10_000)
    ends: set[tuple[str, tuple[int, ...]]] = set()
    for group in made:
        paths = TreePaths(group.tree)
        for call in group.calls:
            trained = [i for i in range(call.sampled_tokens) if i not in call.masked]
            if group.live and call.untrainable is None and trained:
                path = paths.path(call.end_run, call.end_offset).tolist()
                ends.add((group.group_id, tuple(path[: call.prompt_tokens + trained[-1] + 1])))
    paths_of_all = {path for _, path in ends}
    leaves = [p for p in paths_of_all if not any(o != p and o[: len(p)] == p for o in paths_of_all)]
    sequences = [
        tuple(row.tokens.tolist()[start:end])
        for row in batch.rows
        for start, end in itertools.pairwise(row.segment_starts.tolist())
    ]
    assert Counter(sequences) == Counter(leaves)
    in_groups = {(group, path[:size]) for group, path in ends for size in range(1, len(path) + 1)}
    in_all = {path[:size] for path in leaves for size in range(1, len(path) + 1)}
    assert batch.metrics["unique_tokens"] == len(in_groups)
    assert batch.metrics["common_tokens"] == len(in_groups) - len(in_all)
    assert batch.metrics["repeated_ancestor_tokens"] == sum(map(len, leaves)) - len(in_all)


@LAWS
@given(groups(), st.sampled_from([9, 16, 10_000]))
def test_a_tree_row_holds_each_prefix_once(made: list[ScoredGroup], row_tokens: int) -> None:
    batch = packed(made, "prefix_tree", row_tokens)
    distinct: set[tuple[int, ...]] = set()
    for row in batch.rows:
        prefixes = prefixes_in(row)
        assert len(prefixes) == len(set(prefixes))
        distinct |= set(prefixes)
    computed = sum(len(row.tokens) for row in batch.rows)
    assert batch.metrics["computed_tokens"] == computed
    assert batch.metrics["repeated_ancestor_tokens"] == computed - len(distinct)
    assert computed <= packed(made, "prefix_merging", row_tokens).metrics["computed_tokens"]
    if row_tokens == 10_000:
        assert computed == len(distinct)
        assert len(batch.rows) <= 1


SCORES = st.lists(st.none() | st.floats(-5, 5), max_size=9)
CENTRED: list[Estimator] = ["group_mean_std", "group_mean", "leave_one_out", "max_rl"]
ESTIMATORS: list[Estimator] = [*CENTRED, "leave_one_out_std"]


@LAWS
@given(SCORES, st.sampled_from(ESTIMATORS))
def test_advantages_are_finite_and_zero_outside_the_baseline(
    scores: list[float | None], estimator: Estimator
) -> None:
    values, status = advantages(scores, AdvantageRule(estimator))
    assert len(values) == len(scores)
    assert all(math.isfinite(value) for value in values)
    assert all(value == 0 for value, score in zip(values, scores, strict=True) if score is None)
    if status != "ok":
        assert set(values) <= {0.0}


@LAWS
@given(SCORES, st.sampled_from(CENTRED))
def test_advantages_are_centred_and_keep_the_order_of_scores(
    scores: list[float | None], estimator: Estimator
) -> None:
    values, status = advantages(scores, AdvantageRule(estimator))
    assert sum(values) == pytest.approx(0, abs=1e-6)
    if status == "ok":
        scored = [(s, v) for s, v in zip(scores, values, strict=True) if s is not None]
        assert all(a[1] <= b[1] for a in scored for b in scored if a[0] <= b[0])


@LAWS
@given(SCORES, st.randoms(), st.sampled_from(ESTIMATORS))
def test_the_order_of_members_does_not_matter(scores: list[float | None], random, estimator) -> None:
    order = list(range(len(scores)))
    random.shuffle(order)
    here, _ = advantages(scores, AdvantageRule(estimator))
    there, _ = advantages([scores[i] for i in order], AdvantageRule(estimator))
    assert [here[i] for i in order] == there


@LAWS
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_leave_one_out_is_the_mean_of_the_others(scores: list[float]) -> None:
    values, status = advantages(scores, AdvantageRule("leave_one_out"))
    if status == "ok":
        for index, value in enumerate(values):
            others = scores[:index] + scores[index + 1 :]
            assert value == pytest.approx(scores[index] - sum(others) / len(others), abs=1e-9)


@LAWS
@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=8),
    st.floats(-3, 3),
    st.sampled_from(["group_mean", "group_mean_std", "leave_one_out"]),
)
def test_a_bonus_for_everybody_changes_no_advantage(scores, bonus: float, estimator: Estimator) -> None:
    here, status = advantages(scores, AdvantageRule(estimator, zero_variance_tol=1e-3))
    there, shifted = advantages([s + bonus for s in scores], AdvantageRule(estimator, zero_variance_tol=1e-3))
    if status == shifted:
        assert here == pytest.approx(there, rel=1e-6, abs=1e-6)


@LAWS
@given(st.lists(st.lists(st.floats(-5, 5), max_size=4), max_size=5))
def test_credits_of_calls_are_centred_over_rollouts(rollouts: list[list[float]]) -> None:
    rewards = [
        {f"{number}#{seq}": value for seq, value in enumerate(own)} for number, own in enumerate(rollouts)
    ]
    credit = credits_of_calls(rewards, AdvantageRule())
    assert set(credit) <= {call for own in rewards for call in own}
    means = [math.fsum(credit[call] for call in own) / len(own) for own in rewards if own and credit]
    assert math.fsum(means) == pytest.approx(0, abs=1e-9)


@LAWS
@given(groups(), st.data())
def test_credits_of_calls_change_advantages_and_nothing_else(
    made: list[ScoredGroup], data: st.DataObject
) -> None:
    credited = [
        group.model_copy(
            update={
                "call_credits": {
                    call.call_id: data.draw(st.sampled_from([0.5, -1.0, 2.0]))
                    for call in group.calls
                    if data.draw(st.booleans())
                }
            }
        )
        for group in made
    ]
    credit = {call: value for group in credited for call, value in group.call_credits.items()}
    before, after = packed(made, "prefix_merging", 16), packed(credited, "prefix_merging", 16)
    for old, new in zip(before.rows, after.rows, strict=True):
        assert new.model_copy(update={"advantages": old.advantages}) == old
        for ordinal, was, now in zip(old.call_ordinals, old.advantages, new.advantages, strict=True):
            assert now == was + credit.get(old.call_ids[ordinal], 0.0)
