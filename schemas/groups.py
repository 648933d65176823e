"""polar.groups.v1: one tree for a whole group, with advantages per rollout."""

from typing import Literal

from schemas.base import Event, WireModel
from schemas.policies import PolicyVersion
from schemas.sessions import Outcome
from schemas.trees import ListedItem, StitchedCall, TokenTree


class ScoredMember(WireModel):
    """One rollout: the unit of reward, baseline and loss share."""

    session_id: str
    outcome: Outcome
    score: float | None
    """None: excluded from the baseline (see `excluded`)."""
    advantage: float
    """0.0 when excluded or when the group has no spread."""
    excluded: str | None = None
    """`infra_error`, `reward_missing`, `timed_out`, `no_trainable_token`, …"""
    trained_tokens: int
    """Occurrences of this rollout that a batch trains."""
    rewards: dict[str, float] = {}
    """Rewards of the whole session that counted, by name."""


class ScoredGroup(Event):
    """What the packer packs. An occurrence is (call, index): the token at depth
    prompt_tokens + index on the path of the call, predicted at the node before it."""

    type: Literal["ScoredGroup"] = "ScoredGroup"
    group_id: str
    policy: str
    live: bool
    """False: no spread, or fewer than two scored members; contributes nothing, stays listed."""
    reason: str = ""
    tree: TokenTree
    """All members merged."""
    calls: tuple[StitchedCall, ...]
    """Members in order, their calls by seq; `session_id` tells the rollout."""
    members: tuple[ScoredMember, ...]
    call_credits: dict[str, float] = {}
    """call_id → what rewards for this call add to its rollout's advantage; empty unless live."""
    oldest_version: PolicyVersion | None = None
    """Lowest `policy.first` over trained calls, for staleness; none without trained calls."""
    listed: tuple[ListedItem, ...] = ()
    estimator: str
    """How advantages were made, e.g. `group_mean_std`."""
    algorithm: str
