"""A group's members, trajectories and rewards → its seal, and from the seal its ScoredGroup.

Invariants: the ScoredGroup is a pure function of GroupOpened, GroupMembersFixed, GroupSealed
and the trajectories and rewards that the seal lists; the rollout is the unit of score, baseline
and advantage; whoever is left out is listed with a reason.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from polar.core.advantages import AdvantageRule, advantages
from polar.core.prefix_tree import PrefixTree
from schemas.group_events import GroupMember, GroupMembersFixed, GroupOpened, GroupSealed
from schemas.groups import ScoredGroup, ScoredMember
from schemas.ids import trajectory_id
from schemas.policies import PolicyVersion
from schemas.rewards import Reward
from schemas.sessions import Outcome
from schemas.tasks import RewardSpec
from schemas.trajectories import Trajectory
from schemas.trees import ListedItem, StitchedCall, TokenTree

ALGORITHM = "group-1"

SealReason = Literal["complete", "reward_timeout", "cancelled"]

_SCORELESS = {Outcome.INFRA_ERROR: "infra_error", Outcome.CANCELLED: "cancelled"}


@dataclass(slots=True)
class GroupState:
    """What is known of one group; the first record of each id wins."""

    opened: GroupOpened
    fixed: GroupMembersFixed | None = None
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    rewards: dict[str, Reward] = field(default_factory=dict)
    """In order of arrival."""

    def members(self) -> tuple[GroupMember, ...]:
        """The fixed members; none before they are fixed."""
        return self.fixed.members if self.fixed is not None else ()

    def has_all_trajectories(self) -> bool:
        """Whether every member that reached a gateway has its trajectory."""
        return all(
            trajectory_id(member.session_id) in self.trajectories
            for member in self.members()
            if member.has_trajectory
        )

    def has_all_rewards(self, *outcomes: Outcome) -> bool:
        """Whether every member of these outcomes has all required and optional rewards."""
        spec = self.opened.reward
        there = counting_rewards(spec, self.rewards.values())
        return all(
            (member.session_id, name) in there
            for member in self.members()
            if member.outcome in outcomes
            for name in (*spec.required, *spec.optional)
        )

    def seal(self, reason: SealReason) -> GroupSealed:
        """The decision over what has arrived: members in order, rewards that count."""
        session_ids = [member.session_id for member in self.members()]
        present = [trajectory_id(session_id) for session_id in session_ids]
        there = counting_rewards(self.opened.reward, self.rewards.values())
        counted = [reward for (session_id, _), reward in there.items() if session_id in set(session_ids)]
        return GroupSealed(
            group_id=self.opened.group_id,
            trajectory_ids=tuple(each for each in present if each in self.trajectories),
            reward_ids=tuple(sorted(reward.reward_id for reward in counted)),
            reason=reason,
        )

    def score(self, sealed: GroupSealed, rule: AdvantageRule | None = None) -> ScoredGroup:
        """The ScoredGroup of a seal over this state."""
        return score_group(
            self.opened, self.fixed, sealed, self.trajectories, self.rewards, rule or AdvantageRule()
        )


def counting_rewards(spec: RewardSpec, rewards: Iterable[Reward]) -> dict[tuple[str, str], Reward]:
    """(session_id, name) → the reward that counts: of a whole session, of a name that the spec
    knows, the first of its name."""
    names = {*spec.required, *spec.optional}
    counting: dict[tuple[str, str], Reward] = {}
    for reward in rewards:
        if not reward.call_ids and reward.name in names:
            counting.setdefault((reward.session_id, reward.name), reward)
    return counting


def score_group(
    opened: GroupOpened,
    fixed: GroupMembersFixed | None,
    sealed: GroupSealed,
    trajectories: Mapping[str, Trajectory],
    rewards: Mapping[str, Reward],
    rule: AdvantageRule,
) -> ScoredGroup:
    """Derive the ScoredGroup from the seal; ids that it lists and that are not given are listed."""
    members = fixed.members if fixed is not None else ()
    chosen = {each: trajectories[each] for each in sealed.trajectory_ids if each in trajectories}
    counted = [rewards[each] for each in sealed.reward_ids if each in rewards]
    merged = _merge(members, chosen)
    scored = [
        _judge_member(member, chosen.get(trajectory_id(member.session_id)), opened.reward, counted)
        for member in members
    ]
    values, status = advantages([member.score for member in scored], rule)
    is_cancelled = sealed.reason == "cancelled"
    is_live = status == "ok" and not is_cancelled
    oldest = _oldest(call for call, member in merged.calls if scored[member].excluded is None)
    return ScoredGroup(
        group_id=opened.group_id,
        policy=opened.policy,
        live=is_live,
        reason="" if is_live else "cancelled" if is_cancelled else status,
        tree=merged.tree,
        calls=tuple(call for call, _ in merged.calls),
        members=tuple(
            member.model_copy(update={"advantage": value if is_live else 0.0})
            for member, value in zip(scored, values, strict=True)
        ),
        oldest_version=oldest,
        listed=_listed(fixed, sealed, chosen, rewards),
        estimator=rule.estimator,
        algorithm=ALGORITHM,
    )


def trained_tokens(call: StitchedCall) -> int:
    """Occurrences of a call that are trained: none of an untrainable one, else all not masked."""
    return 0 if call.untrainable is not None else call.sampled_tokens - len(call.masked)


@dataclass(frozen=True, slots=True)
class _Merged:
    tree: TokenTree
    calls: list[tuple[StitchedCall, int]]
    """Each call in the merged tree, with the index of its member."""


def _merge(members: Iterable[GroupMember], chosen: Mapping[str, Trajectory]) -> _Merged:
    """One tree for all members; their calls moved into it."""
    tree = PrefixTree()
    placed = []
    for index, member in enumerate(members):
        trajectory = chosen.get(trajectory_id(member.session_id))
        if trajectory is None:
            continue
        there = tree.insert_tree(trajectory.tree)
        placed += [
            (call, index, there.locate(call.end_run, call.end_offset, tree)) for call in trajectory.calls
        ]
    exported = tree.export()
    calls = []
    for call, index, position in placed:
        end_run, end_offset = exported.locate(position)
        calls.append((call.model_copy(update={"end_run": end_run, "end_offset": end_offset}), index))
    return _Merged(exported.tree, calls)


def _judge_member(
    member: GroupMember, trajectory: Trajectory | None, spec: RewardSpec, rewards: Iterable[Reward]
) -> ScoredMember:
    """Score of a member, or why it stands outside the baseline."""
    own = {reward.name: reward.value for reward in rewards if reward.session_id == member.session_id}
    trainable = sum(trained_tokens(call) for call in trajectory.calls) if trajectory else 0
    score, excluded = _score(member.outcome, own, spec)
    if excluded is None and trajectory is None:
        excluded = "no_trajectory"
    if excluded is None and trainable == 0:
        excluded = "no_trainable_token"
    return ScoredMember(
        session_id=member.session_id,
        outcome=member.outcome,
        score=score if excluded is None else None,
        advantage=0.0,
        excluded=excluded,
        trained_tokens=trainable if excluded is None else 0,
        rewards=own,
    )


def _score(
    outcome: Outcome, rewards: Mapping[str, float], spec: RewardSpec
) -> tuple[float | None, str | None]:
    """(score, None), or (None, reason)."""
    if outcome in _SCORELESS:
        return None, _SCORELESS[outcome]
    if outcome is Outcome.TIMED_OUT:
        score = spec.timed_out_score
        return (None, "timed_out") if score is None else _finite(score)
    if any(name not in rewards for name in spec.required):
        return (0.0, None) if outcome is Outcome.AGENT_ERROR else (None, "reward_missing")
    return _finite(sum(spec.weights.get(name, 1.0) * rewards[name] for name in sorted(rewards)))


def _finite(score: float) -> tuple[float | None, str | None]:
    return (score, None) if math.isfinite(score) else (None, "bad_reward")


def _oldest(calls: Iterable[StitchedCall]) -> PolicyVersion | None:
    versions = {call.policy.first for call in calls if trained_tokens(call)}
    return min(versions, key=lambda version: (version.step, version.lineage), default=None)


def _listed(
    fixed: GroupMembersFixed | None,
    sealed: GroupSealed,
    chosen: Mapping[str, Trajectory],
    rewards: Mapping[str, Reward],
) -> tuple[ListedItem, ...]:
    items = list(fixed.superseded) if fixed is not None else []
    for member in fixed.members if fixed is not None else ():
        if member.has_trajectory and trajectory_id(member.session_id) not in chosen:
            items.append(ListedItem(id=member.session_id, reason="no_trajectory", detail=member.reason))
    items += [
        ListedItem(id=each, reason="missing_reward") for each in sealed.reward_ids if each not in rewards
    ]
    return tuple(items)
