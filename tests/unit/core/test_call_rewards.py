"""Rewards for single calls: by call id, on top of the rollout's advantage; bad rewards stop nothing."""

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from polar.core.packing import pack
from schemas.base import canonical_json, encode
from schemas.codec import UnreadableRecordError, decode
from schemas.groups import ScoredGroup
from schemas.rewards import Reward
from schemas.sessions import Outcome
from schemas.tasks import RewardSpec
from schemas.topics import REWARDS
from tests.unit.core.feed import Feed
from tests.unit.core.group_feed import fixed, grouper, opened, reward, sid, the_group, the_seal, trajectory

SPEC: dict[str, Any] = {"per_call": ("step",), "weights": {"step": 0.5}, "estimator": "group_mean"}


def of_call(member: int, seq: int, value: float, **fields: Any) -> Reward:
    return reward(member, value, name="step", call_ids=(f"{sid(member)}#{seq}",), **fields)


def begun(*rewards: Reward, scores: tuple[float, float] = (1.0, 0.0), **spec: Any) -> Feed:
    """A group of two with two calls each, all there but the fixed members."""
    feed = grouper()
    feed(opened(**(SPEC | spec)))
    for member, score in enumerate(scores):
        feed(trajectory(member, calls=2))
        feed(reward(member, score))
    for each in rewards:
        feed(each)
    return feed


def scored(feed: Feed) -> ScoredGroup:
    sealed = the_seal(feed(fixed(), now=0) or feed.tick(100))
    return the_group(feed(sealed, now=100))


def row_advantages(group: ScoredGroup) -> dict[str, set[float]]:
    """call_id → advantages of its tokens in the packed rows."""
    found: dict[str, set[float]] = {}
    for row in pack([group], builder="prefix_merging", row_tokens=64, policy="p", batch_number=0).rows:
        for ordinal, advantage in zip(row.call_ordinals, row.advantages, strict=True):
            found.setdefault(row.call_ids[ordinal], set()).add(round(advantage, 6))
    return found


def test_a_call_s_reward_moves_the_tokens_of_that_call_alone() -> None:
    # weighted: 0.5 and 0 for member 0, 0 for member 1; means 0.25 and 0; baseline 0.125
    group = scored(begun(of_call(0, 1, 1.0), of_call(0, 2, 0.0), of_call(1, 1, 0.0)))
    assert group.call_credits == {f"{sid(0)}#1": 0.375, f"{sid(0)}#2": -0.125, f"{sid(1)}#1": -0.125}
    assert [member.score for member in group.members] == [1.0, 0.0]
    assert [member.rewards for member in group.members] == [{"outcome": 1.0}, {"outcome": 0.0}]
    assert row_advantages(group) == {
        f"{sid(0)}#1": {0.875}, f"{sid(0)}#2": {0.375}, f"{sid(1)}#1": {-0.625}, f"{sid(1)}#2": {-0.5},
    }  # fmt: skip


def test_one_reward_may_name_several_calls() -> None:
    both = reward(0, 1.0, name="step", call_ids=(f"{sid(0)}#1", f"{sid(0)}#2"))
    one_by_one = scored(begun(of_call(0, 1, 1.0), of_call(0, 2, 1.0), of_call(1, 1, 0.0)))
    assert scored(begun(both, of_call(1, 1, 0.0))).call_credits == one_by_one.call_credits


def test_without_rewards_for_calls_nothing_changes() -> None:
    plain = scored(begun(per_call=(), weights={}))
    named = scored(begun())
    assert encode(named) == encode(plain)
    assert row_advantages(named)[f"{sid(0)}#2"] == {0.5}


def test_equal_rollouts_with_unequal_calls_are_a_live_group() -> None:
    group = scored(begun(of_call(0, 1, 1.0), of_call(1, 1, 0.0), scores=(1.0, 1.0)))
    assert (group.live, group.reason) == (True, "")
    assert [member.advantage for member in group.members] == [0.0, 0.0]
    equal = scored(begun(of_call(0, 1, 1.0), of_call(1, 1, 1.0), scores=(1.0, 1.0)))
    assert (equal.live, equal.reason, equal.call_credits) == (False, "zero_variance", {})


def test_a_group_is_complete_once_every_trained_call_has_its_reward() -> None:
    feed = begun(*[of_call(member, seq, 1.0) for member, seq in ((0, 1), (0, 2), (1, 1))])
    assert feed(fixed(), now=0) == []
    assert the_seal(feed(of_call(1, 2, 0.0), now=1)).reason == "complete"


def test_the_first_reward_of_a_call_and_name_counts() -> None:
    feed = begun(of_call(0, 1, 1.0), of_call(0, 1, 9.0, evaluator="other"), of_call(1, 1, 0.0))
    assert scored(feed).call_credits == {f"{sid(0)}#1": 0.25, f"{sid(1)}#1": -0.25}
    assert feed.reasons() == ["not_counted"]


def test_members_outside_the_baseline_have_no_vote() -> None:
    feed = grouper()
    feed(opened(size=3, **SPEC))
    for member, outcome in enumerate((Outcome.COMPLETED, Outcome.COMPLETED, Outcome.INFRA_ERROR)):
        feed(trajectory(member, calls=1, outcome=outcome))
        feed(reward(member, float(member)))
        feed(of_call(member, 1, float(member)))
    group = the_group(
        feed(the_seal(feed(fixed("t", Outcome.COMPLETED, Outcome.COMPLETED, Outcome.INFRA_ERROR))))
    )
    assert group.call_credits == {f"{sid(0)}#1": -0.25, f"{sid(1)}#1": 0.25}
    assert group.listed == ()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (reward(0, 1.0, name="step", call_ids=(f"{sid(0)}#7",)), "unknown_call"),
        (reward(0, 1.0, name="step", call_ids=(f"{sid(1)}#1",)), "unknown_call"),
        (reward(0, 1e300, name="step", call_ids=(f"{sid(0)}#1",)), "bad_reward"),
    ],
    ids=["no such call", "a call of another session", "too large"],
)
def test_a_reward_that_cannot_count_is_listed_with_its_reason(bad: Reward, reason: str) -> None:
    feed = begun(bad)
    group = scored(feed)
    assert [(item.id, item.reason) for item in group.listed] == [(bad.reward_id, reason)]
    assert (group.live, group.call_credits, feed.dead) == (True, {}, [])


@pytest.mark.parametrize(
    "stray",
    [
        reward(0, 1.0, name="outcome", call_ids=(f"{sid(0)}#1",)),  # a name of sessions
        reward(0, 1.0, name="step"),  # a name of calls
        reward(0, 1.0, name="nobody-asked"),
        reward(7, 1.0),  # no member
    ],
    ids=["call id on a session's name", "no call id", "unknown name", "unknown session"],
)
def test_a_reward_that_nobody_asked_for_is_a_dead_letter(stray: Reward) -> None:
    feed = begun(stray)
    group = scored(feed)
    assert feed.reasons() == ["not_counted"]
    assert (group.live, [member.score for member in group.members]) == (True, [1.0, 0.0])


@pytest.mark.parametrize("value", [1e31, -1e308])
def test_a_score_too_large_for_an_advantage_excludes_its_member_alone(value: float) -> None:
    feed = grouper()
    feed(opened(size=3))
    for member, score in enumerate((1.0, 0.0, value)):
        feed(trajectory(member))
        feed(reward(member, score))
    group = the_group(feed(the_seal(feed(fixed("t", *[Outcome.COMPLETED] * 3)))))
    assert [member.excluded for member in group.members] == [None, None, "bad_reward"]
    assert group.live


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_unreadable_on_the_log(value: float) -> None:
    sent = json.loads(encode(reward(0, 1.0))) | {"value": value}
    with pytest.raises(UnreadableRecordError, match="not finite"):
        decode(canonical_json(sent), REWARDS)


@pytest.mark.parametrize(
    "spec",
    [
        {"required": ["a"], "optional": ["a"]},
        {"required": ["a", "a"]},
        {"required": ["a"], "per_call": ["a"]},
        {"required": ["a"], "weights": {"b": 1.0}},
        {"weights": {"outcome": math.inf}},
        {"timed_out_score": math.nan},
        {"estimator": "best_of"},
    ],
)
def test_a_spec_that_means_two_things_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RewardSpec(**spec)


def test_the_task_s_estimator_goes_before_the_grouper_s() -> None:
    for asked, used in (("leave_one_out", "leave_one_out"), (None, "group_mean_std")):
        group = scored(begun(estimator=asked))
        assert group.estimator == used
    assert [member.advantage for member in scored(begun(estimator="leave_one_out")).members] == [1.0, -1.0]
