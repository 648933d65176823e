"""The grouper's rules, one a test."""

from typing import Any

import pytest

from polar.core.grouper_stage import SEAL_OFFSET, TOPICS, GrouperCore
from polar.core.stitching import stitch
from schemas.group_events import GroupMember, GroupMembersFixed
from schemas.groups import ScoredGroup
from schemas.sessions import Outcome
from schemas.topics import GROUP_EVENTS, REWARDS, TRAJECTORIES
from schemas.trees import ListedItem
from tests.unit.core.call_records import SessionRecords
from tests.unit.core.feed import Feed
from tests.unit.core.group_feed import (
    WAITS,
    fixed,
    grouper,
    opened,
    reward,
    sid,
    the_group,
    the_seal,
    trajectory,
)

PARTS = [trajectory(0), trajectory(1), reward(0, 1.0), reward(1, 0.0), fixed()]


@pytest.mark.parametrize("last", range(len(PARTS)))
def test_a_group_is_sealed_with_its_last_missing_part_and_emitted_when_the_seal_is_read(last: int) -> None:
    feed = grouper()
    feed(opened())
    for part in PARTS[:last] + PARTS[last + 1 :]:
        assert feed(part) == []
    sealed = the_seal(feed(PARTS[last]))
    assert sealed.reason == "complete"
    assert sealed.trajectory_ids == (f"trajectory:{sid(0)}", f"trajectory:{sid(1)}")
    group = the_group(feed(sealed))
    assert feed.headers == [{"seal-partition": "0", SEAL_OFFSET: "2"}]
    assert group.live
    assert [member.score for member in group.members] == [1.0, 0.0]
    assert group.members[0].advantage == -group.members[1].advantage > 0
    assert len(group.tree.tokens) == 5, "the members' trees are one"
    assert feed.core.metrics()["open_groups"] == 0


def test_the_first_seal_by_offset_wins() -> None:
    feed = grouper()
    feed(opened())
    sealed = the_seal([event for part in PARTS for event in feed(part)])
    other = sealed.model_copy(update={"reward_ids": (), "reason": "reward_timeout"})
    group = the_group(feed(other))
    assert [member.excluded for member in group.members] == ["reward_missing", "reward_missing"]
    assert feed(sealed) == []


def test_groups_leave_in_the_order_of_their_seals() -> None:
    feed = grouper()
    seals = {}
    for group in ("a", "b"):
        feed(opened(group, 1, required=()))
        feed(fixed(group, Outcome.COMPLETED))
        seals[group] = the_seal(feed(trajectory(0, group)))
    later = Feed(GrouperCore(waits=WAITS), *TOPICS)  # another process reads events before trajectories
    for group in ("a", "b"):
        later(opened(group, 1, required=()))
        later(fixed(group, Outcome.COMPLETED))
    assert later(seals["b"]) == later(seals["a"]) == []
    assert later(trajectory(0, "a")) == []
    assert [event.group_id for event in later(trajectory(0, "b"))] == ["b", "a"]


def test_optional_rewards_are_waited_for_until_the_timeout() -> None:
    feed = grouper()
    feed(opened(optional=("style",)))
    for part in PARTS[:4]:
        feed(part)
    assert feed(fixed(), now=10) == []
    assert feed.tick(109) == []
    sealed = the_seal(feed.tick(110))
    assert sealed.reason == "reward_timeout"
    group = the_group(feed(sealed, now=111))
    assert [member.score for member in group.members] == [1.0, 0.0]


def test_a_missing_required_reward_excludes_its_member_after_the_timeout() -> None:
    feed = grouper()
    feed(opened(size=3))
    for part in (trajectory(0), trajectory(1), trajectory(2), reward(0, 1.0), reward(1, 0.0)):
        feed(part)
    assert feed(fixed("t", *[Outcome.COMPLETED] * 3), now=0) == []
    group = the_group(feed(the_seal(feed.tick(100))))
    assert [member.excluded for member in group.members] == [None, None, "reward_missing"]
    assert group.live


def test_a_trajectory_is_waited_for_longer_than_rewards() -> None:
    feed = grouper()
    feed(opened())
    feed(trajectory(0))
    feed(fixed(), now=0)
    assert feed.tick(999) == []
    group = the_group(feed(the_seal(feed.tick(1000)), now=1000))
    assert group.members[1].excluded == "reward_missing"
    assert [(item.id, item.reason) for item in group.listed] == [(sid(1), "no_trajectory")]


def test_failed_members_score_zero_unless_their_reward_comes_in_time() -> None:
    for reward_comes in (False, True):
        feed = grouper()
        feed(opened())
        for part in (trajectory(0), trajectory(1, outcome=Outcome.AGENT_ERROR), reward(0, 1.0)):
            feed(part)
        feed(fixed("t", Outcome.COMPLETED, Outcome.AGENT_ERROR), now=0)
        sealed = the_seal(feed(reward(1, 0.5), now=1) if reward_comes else feed.tick(2))
        group = the_group(feed(sealed, now=3))
        assert group.members[1].score == (0.5 if reward_comes else 0.0)


@pytest.mark.parametrize(
    ("outcome", "spec", "score", "excluded"),
    [
        (Outcome.INFRA_ERROR, {}, None, "infra_error"),
        (Outcome.CANCELLED, {}, None, "cancelled"),
        (Outcome.TIMED_OUT, {}, None, "timed_out"),
        (Outcome.TIMED_OUT, {"timed_out_score": -1.0}, -1.0, None),
    ],
)
def test_outcomes_that_have_no_reward(
    outcome: Outcome, spec: dict[str, Any], score: float | None, excluded: str | None
) -> None:
    feed = grouper()
    feed(opened(**spec))
    for part in (trajectory(0), trajectory(1, outcome=outcome), reward(0, 1.0), reward(1, 1.0)):
        feed(part)
    group = the_group(feed(the_seal(feed(fixed("t", Outcome.COMPLETED, outcome)))))
    assert (group.members[1].score, group.members[1].excluded) == (score, excluded)
    assert group.live == (score is not None)


def test_a_member_that_never_reached_a_gateway_is_not_waited_for() -> None:
    feed = grouper()
    feed(opened(required=()))
    lost = GroupMember(session_id=sid(1), outcome=Outcome.INFRA_ERROR, has_trajectory=False)
    here = GroupMember(session_id=sid(0), outcome=Outcome.COMPLETED)
    feed(GroupMembersFixed(group_id="t", members=(here, lost)))
    group = the_group(feed(the_seal(feed(trajectory(0)))))
    assert (group.live, group.reason) == (False, "single_survivor")


def test_a_cancelled_group_is_sealed_at_once_and_not_live() -> None:
    feed = grouper()
    feed(opened())
    for part in PARTS[:4]:
        feed(part)
    group = the_group(feed(the_seal(feed(fixed(reason="cancelled")))))
    assert (group.live, group.reason) == (False, "cancelled")
    assert {member.advantage for member in group.members} == {0.0}


def test_rewards_are_weighted_and_only_the_first_of_a_name_counts() -> None:
    feed = grouper()
    feed(opened(required=("outcome", "style"), weights={"style": 0.5}))
    for part in (trajectory(0), trajectory(1), reward(1, 0.0), reward(1, 0.0, name="style")):
        feed(part)
    feed(reward(0, 1.0))
    feed(reward(0, 7.0, evaluator="other"))
    feed(reward(0, 9.0, name="unknown"))
    feed(reward(0, 9.0, call_ids=(f"{sid(0)}#1",)))
    feed(reward(0, 1.0, name="style"))
    group = the_group(feed(the_seal(feed(fixed()))))
    assert [member.score for member in group.members] == [1.5, 0.0]
    assert feed.reasons() == ["not_counted"] * 3


def test_superseded_sessions_are_listed_and_no_dead_letters() -> None:
    feed = grouper()
    feed(opened())
    old = SessionRecords("t/0/0/0")
    feed(stitch(old.opened, [], old.sealed(Outcome.INFRA_ERROR)))
    for part in PARTS[:4]:
        feed(part)
    listed = (ListedItem(id="t/0/0/0", reason="superseded"),)
    group = the_group(feed(the_seal(feed(fixed(superseded=listed)))))
    assert group.listed == listed
    assert feed.reasons() == []


def test_parts_wait_for_their_group_and_hold_the_commit() -> None:
    feed = grouper()
    feed(trajectory(0), now=0)
    feed(reward(0, 1.0), now=0)
    assert (feed.committed(TRAJECTORIES), feed.committed(REWARDS)) == (0, 0)
    assert feed.tick(59) == []
    feed(opened(size=1), now=59)
    assert the_seal(feed(fixed("t", Outcome.COMPLETED), now=59)).reward_ids


def test_parts_whose_group_never_comes_are_listed_late() -> None:
    feed = grouper()
    feed(trajectory(0), now=0)
    feed(reward(0, 1.0), now=0)
    feed(opened("other"), now=57)
    feed.tick(60)
    assert feed.reasons() == [], "group events still come: the stage may lag"
    feed.tick(62)
    assert feed.reasons() == ["late_trajectory", "late_reward"]
    assert (feed.committed(TRAJECTORIES), feed.committed(GROUP_EVENTS)) == (1, 0)


def test_late_rewards_of_a_closed_group_are_listed_and_duplicates_are_not() -> None:
    feed = grouper()
    feed(opened())
    sealed = the_seal([event for part in PARTS for event in feed(part)])
    feed(sealed)
    feed(reward(0, 1.0))
    assert feed.reasons() == []
    feed(reward(0, 1.0, evaluator="later"))
    assert feed.reasons() == ["late_reward"]


def test_waiting_records_are_bounded() -> None:
    feed = grouper(max_waiting=10)
    for number in range(30):
        feed(reward(0, 1.0, group=f"g{number}"))
    assert feed.core.metrics()["waiting_records"] == 10
    assert feed.reasons() == ["late_reward"] * 20


def test_surplus_groups_are_cancelled_by_a_seal() -> None:
    feed = grouper(max_open_groups=3)
    for number in range(5):
        feed(opened(f"g{number}"))
    seals = feed.tick(1)
    assert [(seal.group_id, seal.reason) for seal in seals] == [("g0", "cancelled"), ("g1", "cancelled")]
    for seal in seals:
        assert the_group(feed(seal)).live is False
    assert feed.core.metrics()["open_groups"] == 3


def test_a_seal_from_before_the_start_is_obeyed_and_not_decided_again() -> None:
    first = grouper()
    first(opened())
    sealed = the_seal([event for part in PARTS for event in first(part)])
    again = Feed(GrouperCore(waits=WAITS), *TOPICS, zone=4)
    for part in (opened(), *PARTS):
        assert again(part) == [], "nothing is decided before own seals were read back"
    group = the_group(again(sealed))
    assert group == the_group(first(sealed))


def test_a_group_that_was_closed_before_the_start_is_not_emitted_from_what_is_left() -> None:
    """Its GroupOpened is read again because an older group is open; its parts are committed."""
    first = grouper()
    first(opened("old"))
    first(opened())
    sealed = the_seal([event for part in PARTS for event in first(part)])
    the_group(first(sealed))
    assert first.committed(TRAJECTORIES) == 2
    again = Feed(GrouperCore(waits=WAITS), *TOPICS, zone=4, starts={"trajectories.v1": 2, "rewards.v1": 2})
    for event in (opened("old"), opened(), fixed(), sealed):
        assert again(event) == []
    for suffix in ("trajectories.v1", "rewards.v1"):
        for number in range(4):
            part = (
                trajectory(number, "old") if suffix == "trajectories.v1" else reward(number, 1.0, group="old")
            )
            assert again(part) == []
    assert again.caught_up() == []
    assert again.core.metrics()["open_groups"] == 1, "only the old one"


def test_a_repeated_opening_does_not_bring_back_a_group_that_was_closed_before_the_start() -> None:
    """The commit lies behind GroupMembersFixed, in front of a repeated GroupOpened and the seal."""
    first = grouper()
    first(opened())
    sealed = the_seal([event for part in PARTS for event in first(part)])
    again = Feed(GrouperCore(waits=WAITS), *TOPICS, zone={"group-events.v1": 2, "trajectories.v1": 2})
    assert again(opened()) == again(sealed) == []
    for part in PARTS[:4]:
        again(part)
    assert again.caught_up() == []
    assert [event for event in again.written if isinstance(event, ScoredGroup)] == []
    assert again.core.metrics()["open_groups"] == 0
