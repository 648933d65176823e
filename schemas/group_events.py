"""polar.group-events.v1: decisions about groups."""

from typing import Literal

from schemas.base import Event, WireModel
from schemas.sessions import Outcome
from schemas.tasks import RewardSpec
from schemas.trees import ListedItem


class GroupOpened(Event):
    """Opens the key; acknowledged before any session of the group is requested."""

    type: Literal["GroupOpened"] = "GroupOpened"
    group_id: str
    policy: str
    size: int
    reward: RewardSpec


class GroupMember(WireModel):
    """One member as it counts for the group."""

    session_id: str
    outcome: Outcome
    reason: str = ""
    has_trajectory: bool = True
    """False: the session never reached a gateway, no trajectory will come."""


class GroupMembersFixed(Event):
    """Which sessions are the group's members; written once all have ended or at the deadline."""

    type: Literal["GroupMembersFixed"] = "GroupMembersFixed"
    group_id: str
    members: tuple[GroupMember, ...]
    """In order of member number."""
    superseded: tuple[ListedItem, ...] = ()
    """Earlier attempts that a later session replaced."""
    reason: Literal["all_ended", "deadline", "cancelled"] = "all_ended"


class GroupSealed(Event):
    """The decision from which the ScoredGroup follows; the first one by offset wins."""

    type: Literal["GroupSealed"] = "GroupSealed"
    group_id: str
    trajectory_ids: tuple[str, ...]
    """In order of the fixed members; members without a trajectory are left out."""
    reward_ids: tuple[str, ...]
    """Sorted; only these count."""
    reason: Literal["complete", "reward_timeout", "cancelled"]
