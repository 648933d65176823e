"""A group's members, trajectories and rewards → its seal, and from the seal its ScoredGroup.

Invariants: the ScoredGroup is a pure function of GroupOpened, GroupMembersFixed, GroupSealed
and the trajectories and rewards that the seal lists; the rollout is the unit of score, baseline
and advantage; whoever is left out is listed with a reason.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from polar.core.advantages import MAX_SCORE, AdvantageRule, advantages, credits_of_calls
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

ALGORITHM = "group-2"

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
        """Whether every member of these outcomes has all required and optional rewards, and its
        trained calls have those per call."""
        spec = self.opened.reward
        there = counting_rewards(spec, self.rewards.values())
        return all(
            (about, name) in there
            for member in self.members()
            if member.outcome in outcomes
            for about, names in self._rewarded(member, spec)
            for name in names
        )

    def _rewarded(self, member: GroupMember, spec: RewardSpec) -> Iterable[tuple[str, Sequence[str]]]:
        """(session_id or call_id, names of the rewards that are due for it)."""
        yield member.session_id, (*spec.required, *spec.optional)
        trajectory = self.trajectories.get(trajectory_id(member.session_id))
        for call in trajectory.calls if trajectory is not None and spec.per_call else ():
            if trained_tokens(call):
                yield call.call_id, spec.per_call

    def counted_rewards(self) -> tuple[str, ...]:
        """Ids of the rewards so far that count for a member or a call of it, sorted."""
        session_ids = {member.session_id for member in self.members()}
        counting = counting_rewards(self.opened.reward, self.rewards.values()).values()
        return tuple(sorted({reward.reward_id for reward in counting if reward.session_id in session_ids}))

    def seal(self, reason: SealReason) -> GroupSealed:
        """The decision over what has arrived: members in order, rewards that count."""
        present = [trajectory_id(member.session_id) for member in self.members()]
        return GroupSealed(
            group_id=self.opened.group_id,
            trajectory_ids=tuple(each for each in present if each in self.trajectories),
            reward_ids=self.counted_rewards(),
            reason=reason,
        )

    def rule(self, default: AdvantageRule) -> AdvantageRule:
        """The default, with the estimator that the task asks for."""
        return replace(default, estimator=self.opened.reward.estimator or default.estimator)

    def score(self, sealed: GroupSealed, rule: AdvantageRule) -> ScoredGroup:
        """The ScoredGroup of a seal over this state."""
        return score_group(self.opened, self.fixed, sealed, self.trajectories, self.rewards, rule)


def counting_rewards(spec: RewardSpec, rewards: Iterable[Reward]) -> dict[tuple[str, str], Reward]:
    """(session_id or call_id, name) → the reward that counts: of a name that the spec knows for a
    session or for a call, the first of its name.

    A seal holds no order of arrival: where two rewards that it lists name one call, the smaller
    id counts."""
    of_session, of_call = {*spec.required, *spec.optional}, set(spec.per_call)
    counting: dict[tuple[str, str], Reward] = {}
    for reward in rewards:
        if reward.name in (of_call if reward.call_ids else of_session):
            for about in reward.call_ids or (reward.session_id,):
                counting.setdefault((about, reward.name), reward)
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
    spec = opened.reward
    chosen = {each: trajectories[each] for each in sealed.trajectory_ids if each in trajectories}
    counted = [rewards[each] for each in sealed.reward_ids if each in rewards]
    merged = _merge(members, chosen)
    scored = [
        _judge_member(member, chosen.get(trajectory_id(member.session_id)), spec, counted)
        for member in members
    ]
    values, status = advantages([member.score for member in scored], rule)
    excluded = frozenset(member.session_id for member in scored if member.excluded is not None)
    call_rewards = _CallRewards(spec, counted, [call for call, _ in merged.calls], excluded)
    call_credits = call_rewards.credits(rule)
    if status == "zero_variance" and any(map(abs, call_credits.values())):
        status = "ok"  # the rollouts are equal, their calls are not
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
        call_credits=call_credits if is_live else {},
        oldest_version=oldest,
        listed=(*_listed(fixed, sealed, chosen, rewards), *call_rewards.listed),
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
    own = {
        reward.name: reward.value
        for reward in rewards
        if reward.session_id == member.session_id and not reward.call_ids
    }
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
        return (None, "timed_out") if score is None else _bounded(score)
    if any(name not in rewards for name in spec.required):
        return (0.0, None) if outcome is Outcome.AGENT_ERROR else (None, "reward_missing")
    return _bounded(sum(spec.weights.get(name, 1.0) * rewards[name] for name in sorted(rewards)))


def _bounded(score: float) -> tuple[float | None, str | None]:
    """Neither NaN nor so large that an advantage would not be finite."""
    return (score, None) if abs(score) <= MAX_SCORE else (None, "bad_reward")


class _CallRewards:
    """The counted rewards for single calls, and what becomes of those that cannot count."""

    def __init__(
        self,
        spec: RewardSpec,
        counted: Iterable[Reward],
        calls: Iterable[StitchedCall],
        excluded: frozenset[str],
    ) -> None:
        """`excluded`: sessions outside the baseline; what they were given says nothing."""
        by_id = {call.call_id: call for call in calls}
        self.listed: list[ListedItem] = []
        self._values: dict[str, dict[str, dict[str, float]]] = {name: {} for name in spec.per_call}
        """Name → session_id → call_id → weighted value."""
        for (call_id, name), reward in counting_rewards(spec, counted).items():
            if not reward.call_ids or reward.session_id in excluded:
                continue
            call = by_id.get(call_id)
            value = spec.weights.get(name, 1.0) * reward.value
            if call is None or call.session_id != reward.session_id:
                self._list(reward, "unknown_call", f"{call_id} is no call of {reward.session_id}")
            elif not trained_tokens(call):
                self._list(
                    reward, "call_not_trained", f"{call_id}: {call.untrainable or 'every token is masked'}"
                )
            elif abs(value) <= MAX_SCORE:
                self._values[name].setdefault(call.session_id, {})[call_id] = value
            else:
                self._list(reward, "bad_reward", f"{name} of {call_id} is {value}")

    def credits(self, rule: AdvantageRule) -> dict[str, float]:
        """call_id → what is added to the advantage of its rollout, over all names."""
        total: dict[str, float] = {}
        for name in sorted(self._values):
            by_session = self._values[name]
            added = credits_of_calls([by_session[each] for each in sorted(by_session)], rule)
            for call_id, value in added.items():
                total[call_id] = total.get(call_id, 0.0) + value
        return dict(sorted(total.items()))

    def _list(self, reward: Reward, reason: str, detail: str) -> None:
        self.listed.append(ListedItem(id=reward.reward_id, reason=reason, detail=detail))


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
