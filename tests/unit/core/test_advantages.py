"""The estimators on small groups, worked out by hand, and scores that must not stop anything."""

import math

import pytest

from polar.core.advantages import MAX_SCORE, AdvantageRule, advantages, credits_of_calls
from schemas.tasks import Estimator

RULE = AdvantageRule(eps=0.0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # μ = 0.25, σ = √3/4
        ("group_mean", [0.75, -0.25, -0.25, -0.25]),
        ("group_mean_std", [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]),
        ("leave_one_out", [1.0, *[-1 / 3] * 3]),
        # the winner's others have no spread: undivided; a loser's others are 1, 0, 0: σ = √2/3
        ("leave_one_out_std", [1.0, *[-1 / math.sqrt(2)] * 3]),
        ("max_rl", [3.0, -1.0, -1.0, -1.0]),
    ],
)
def test_one_winner_of_four(estimator: Estimator, expected: list[float]) -> None:
    values, status = advantages([1.0, 0.0, 0.0, 0.0], AdvantageRule(estimator, eps=0.0))
    assert status == "ok"
    assert values == pytest.approx(expected)


def test_members_outside_the_baseline_change_nothing() -> None:
    alone, _ = advantages([2.0, 1.0, 0.0], RULE)
    among, _ = advantages([None, 2.0, None, 1.0, 0.0], RULE)
    assert among == [0.0, alone[0], 0.0, alone[1], alone[2]]


def test_max_rl_has_no_meaning_below_zero() -> None:
    assert advantages([1.0, -1.0, 0.0], AdvantageRule("max_rl")) == ([0.0, 0.0, 0.0], "negative_scores")
    assert advantages([-1.0, -1.0], AdvantageRule("max_rl")) == ([0.0, 0.0], "zero_variance")


@pytest.mark.parametrize(
    "estimator", ["group_mean_std", "group_mean", "leave_one_out", "leave_one_out_std", "max_rl"]
)
@pytest.mark.parametrize(
    "scores", [[MAX_SCORE, 0.0], [MAX_SCORE, MAX_SCORE, 1.0], [2e-6, 0.0, 0.0], [5e-324, 1.0, 1.0]]
)
def test_advantages_fit_into_float32(estimator: Estimator, scores: list[float]) -> None:
    values, _ = advantages(scores, AdvantageRule(estimator))
    assert all(abs(value) < 3e38 for value in values)


def test_credits_are_relative_to_the_mean_over_rollouts() -> None:
    # means of the rollouts: 0.5 and 0.0; a rollout without a rewarded call has no vote
    credit = credits_of_calls([{"a#1": 1.0, "a#2": 0.0}, {"b#1": 0.0}, {}], RULE)
    assert credit == {"a#1": 0.75, "a#2": -0.25, "b#1": -0.25}


def test_many_calls_of_one_rollout_have_one_vote() -> None:
    many = {f"a#{number}": 1.0 for number in range(99)}
    credit = credits_of_calls([many, {"b#1": 0.0}], RULE)
    assert credit["b#1"] == -0.5
    assert credit["a#0"] == 0.5


@pytest.mark.parametrize("rewards", [[], [{}], [{"a#1": 1.0, "a#2": 0.0}], [{"a#1": 0.3}, {"b#1": 0.3}]])
def test_nothing_to_compare_gives_no_credit(rewards: list[dict[str, float]]) -> None:
    assert credits_of_calls(rewards, RULE) == {}
