"""The events of small groups, and a grouper that takes them one by one."""

from typing import Any

from polar.core.grouper_stage import TOPICS, GrouperCore, GrouperWaits
from polar.core.stitching import stitch
from schemas.group_events import GroupMember, GroupMembersFixed, GroupOpened, GroupSealed
from schemas.groups import ScoredGroup
from schemas.rewards import Reward, reward_id
from schemas.sessions import Outcome
from schemas.tasks import RewardSpec
from schemas.trajectories import Trajectory
from tests.unit.core.call_records import SessionRecords
from tests.unit.core.feed import Feed

WAITS = GrouperWaits(unknown_group=60, quiet=5, unknown_group_at_most=600, trajectory=1000)


def sid(member: int, group: str = "t") -> str:
    return f"{group}/{member}/0/1"


def opened(group: str = "t", size: int = 2, **spec: Any) -> GroupOpened:
    reward = RewardSpec(**({"timeout_seconds": 100} | spec))
    return GroupOpened(group_id=group, policy="p", size=size, reward=reward)


def fixed(group: str = "t", *outcomes: Outcome, **fields: Any) -> GroupMembersFixed:
    members = tuple(
        GroupMember(session_id=sid(number, group), outcome=outcome)
        for number, outcome in enumerate(outcomes or (Outcome.COMPLETED, Outcome.COMPLETED))
    )
    return GroupMembersFixed(group_id=group, members=members, **fields)


def trajectory(
    member: int, group: str = "t", outcome: Outcome = Outcome.COMPLETED, *, calls: int = 1
) -> Trajectory:
    """Calls that continue each other, of two sampled tokens each."""
    records = SessionRecords(sid(member, group))
    prompt = [1, 2]
    for number in range(calls):
        records.call(prompt, [3, 4 + member], base=number or None)
        prompt = [*prompt, 3, 4 + member, 5]
    return stitch(records.opened, records.records, records.sealed(outcome))


def reward(
    member: int, value: float, *, group: str = "t", name: str = "outcome", evaluator: str = "e", **fields: Any
) -> Reward:
    session_id = sid(member, group)
    return Reward(
        reward_id=reward_id(session_id, name, evaluator, "1", fields.get("call_ids", ())),
        session_id=session_id,
        group_id=group,
        name=name,
        value=value,
        evaluator=evaluator,
        **fields,
    )


def grouper(**options: Any) -> Feed:
    return Feed(GrouperCore(waits=WAITS, **options), *TOPICS)


def the_seal(events: list[Any]) -> GroupSealed:
    (sealed,) = events
    assert isinstance(sealed, GroupSealed)
    return sealed


def the_group(events: list[Any]) -> ScoredGroup:
    (group,) = events
    assert isinstance(group, ScoredGroup)
    return group
