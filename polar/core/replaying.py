"""A recorded log → its trajectories, groups and batches again, by the recorded decisions.

`replay` takes the records of a run (each partition's in order, partitions in any interleaving)
and obeys SessionSealed / SessionAbandoned, GroupMembersFixed, GroupSealed and BatchManifest; the
rest is computed anew and compared by digest with what was recorded. It keeps no partition
numbers or offsets, so a copy with another partition count gives the same result.

With `rewards`, an outside set of rewards takes the place of the recorded ones: members, trees
and the order of batches stay; scores, advantages and rows follow from the new rewards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from polar.core.advantages import AdvantageRule
from polar.core.batching import BatchMismatchError, remake_batch
from polar.core.drift import Decode
from polar.core.grouping import GroupState
from polar.core.session_log import SessionLog
from polar.core.stage import LogRecord
from schemas.base import digest, digest_of
from schemas.batches import BatchManifest, Builder, PackedRow
from schemas.calls import CallRecord, SessionAbandoned, SessionOpened, SessionSealed
from schemas.group_events import GroupMembersFixed, GroupOpened, GroupSealed
from schemas.groups import ScoredGroup
from schemas.ids import trajectory_id
from schemas.policies import PolicyPublished
from schemas.rewards import Reward
from schemas.tasks import Estimator
from schemas.trajectories import Trajectory, UsabilityRules

Kind = Literal["trajectory", "group", "batch"]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What is computed otherwise than recorded; the defaults are a faithful replay."""

    rewards: tuple[Reward, ...] | None = None
    """Rewards that take the place of the recorded ones."""
    builder: Builder | None = None
    row_tokens: int | None = None
    estimator: Estimator | None = None
    """None: as recorded with each group."""

    @property
    def is_faithful(self) -> bool:
        """Whether digests must equal the recorded ones."""
        return self == ReplayOptions()


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A value that came out otherwise than recorded, or on one side only."""

    kind: Kind
    id: str
    recorded: str
    """Digest; empty where nothing was recorded."""
    replayed: str
    """Digest; empty where it could not be made again (see `detail`)."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReplayedBatch:
    """A batch made again."""

    manifest: BatchManifest
    rows: tuple[PackedRow, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """What came out."""

    trajectories: dict[str, Trajectory]
    """By trajectory id."""
    groups: dict[str, ScoredGroup]
    """By group id."""
    batches: tuple[ReplayedBatch, ...]
    """By batch number."""
    policies: tuple[PolicyPublished, ...]
    """Published versions in order of the log."""
    mismatches: tuple[Mismatch, ...]
    """Against what was recorded. Expected where the options change something."""
    compared: dict[Kind, int]
    """Recorded values that were compared, by kind."""

    def digests(self) -> dict[str, str]:
        """One digest over all values of a kind, in order of their ids (batches: numbers)."""
        return {
            "trajectories": digest_of(*(self.trajectories[key] for key in sorted(self.trajectories))),
            "groups": digest_of(*(self.groups[key] for key in sorted(self.groups))),
            "batches": batches_digest(batch.manifest for batch in self.batches),
        }


def batches_digest(manifests: Iterable[BatchManifest]) -> str:
    """Digest over manifests in the given order; each covers its rows by `rows_digest`."""
    return digest(*(digest_of(manifest).encode() for manifest in manifests))


@dataclass(slots=True)
class _Recorded:
    """The log by key; the first record of each id wins."""

    sessions: dict[str, SessionLog] = field(default_factory=dict)
    closings: dict[str, SessionSealed | SessionAbandoned] = field(default_factory=dict)
    groups: dict[str, GroupState] = field(default_factory=dict)
    seals: dict[str, GroupSealed] = field(default_factory=dict)
    rewards: dict[str, dict[str, Reward]] = field(default_factory=dict)
    """Group id → reward id → reward."""
    manifests: dict[int, BatchManifest] = field(default_factory=dict)
    rows: dict[int, dict[int, PackedRow]] = field(default_factory=dict)
    policies: list[PolicyPublished] = field(default_factory=list)
    trajectories: dict[str, str] = field(default_factory=dict)
    rules: dict[str, UsabilityRules] = field(default_factory=dict)
    """Trajectory id → rules of its recorded trajectory."""
    scored: dict[str, str] = field(default_factory=dict)
    """Digests of recorded trajectories and ScoredGroups by id."""
    estimators: dict[str, str] = field(default_factory=dict)
    """Group id → estimator of its recorded ScoredGroup."""

    def take(self, record: LogRecord) -> None:
        match record.event:
            case SessionOpened() as event:
                self.sessions.setdefault(event.session_id, SessionLog(event))
            case CallRecord() as event:
                if event.session_id in self.sessions and event.session_id not in self.closings:
                    self.sessions[event.session_id].add(event)
            case SessionSealed() | SessionAbandoned() as event:
                if event.session_id in self.sessions:
                    self.closings.setdefault(event.session_id, event)
            case GroupOpened() as event:
                self.groups.setdefault(event.group_id, GroupState(event))
            case GroupMembersFixed() as event:
                state = self.groups.get(event.group_id)
                if state is not None and state.fixed is None and event.group_id not in self.seals:
                    state.fixed = event
            case GroupSealed() as event:
                if event.group_id in self.groups:
                    self.seals.setdefault(event.group_id, event)
            case Reward() as event:
                self.rewards.setdefault(event.group_id, {}).setdefault(event.reward_id, event)
            case Trajectory() as event:
                self.trajectories.setdefault(event.trajectory_id, digest_of(event))
                self.rules.setdefault(event.trajectory_id, event.rules)
            case ScoredGroup() as event:
                self.scored.setdefault(event.group_id, digest_of(event))
                self.estimators.setdefault(event.group_id, event.estimator)
            case BatchManifest() as event:
                self.manifests.setdefault(event.number, event)
            case PackedRow() as event:
                self.rows.setdefault(event.batch_number, {}).setdefault(event.index, event)
            case PolicyPublished() as event:
                self.policies.append(event)
            case _:
                pass

    def stitch(self, decode: Decode | None = None) -> dict[str, Trajectory]:
        """Trajectories of the closed sessions by id, judged by the recorded rules."""
        made = [
            self.sessions[key].close(closing, self.rules.get(trajectory_id(key)), decode)
            for key, closing in self.closings.items()
        ]
        return {trajectory.trajectory_id: trajectory for trajectory in made}


def restitch(records: Iterable[LogRecord], decode: Decode | None = None) -> dict[str, Trajectory]:
    """The trajectories of all closed sessions by id, made anew from the calls topic. `decode`: ids →
    text, for what stands on both sides of a split."""
    recorded = _Recorded()
    for record in records:
        recorded.take(record)
    return recorded.stitch(decode)


def replay(
    records: Iterable[LogRecord],
    options: ReplayOptions | None = None,
) -> Replay:
    """Rebuild everything from the log of a run.

    Needs the calls, rewards, group-events, trajectories, groups, batches and policies topics;
    recorded outputs are only compared, and tell by which rules calls were judged.
    """
    options = options or ReplayOptions()
    recorded = _Recorded()
    for record in records:
        recorded.take(record)
    trajectories = recorded.stitch()
    groups = _score_groups(recorded, trajectories, options)
    mismatches = [
        *_compare("trajectory", recorded.trajectories, {k: digest_of(v) for k, v in trajectories.items()}),
        *_compare("group", recorded.scored, {k: digest_of(v) for k, v in groups.items()}),
    ]
    batches: list[ReplayedBatch] = []
    for number in sorted(recorded.manifests):
        batch, differs = _replay_batch(recorded, number, groups, options)
        batches += [batch] if batch is not None else []
        mismatches += differs
    return Replay(
        trajectories=trajectories,
        groups=groups,
        batches=tuple(batches),
        policies=tuple(recorded.policies),
        mismatches=tuple(mismatches),
        compared={
            "trajectory": len(recorded.trajectories),
            "group": len(recorded.scored),
            "batch": len(recorded.manifests),
        },
    )


def _score_groups(
    recorded: _Recorded,
    trajectories: Mapping[str, Trajectory],
    options: ReplayOptions,
) -> dict[str, ScoredGroup]:
    by_group: dict[str, dict[str, Reward]] = {}
    for reward in options.rewards or ():
        by_group.setdefault(reward.group_id, {}).setdefault(reward.reward_id, reward)
    groups = {}
    for group_id, sealed in recorded.seals.items():
        state = recorded.groups[group_id]
        state.trajectories = {
            each: trajectories[each] for each in sealed.trajectory_ids if each in trajectories
        }
        state.rewards = (by_group if options.rewards is not None else recorded.rewards).get(group_id, {})
        rule = state.rule(AdvantageRule())
        estimator = options.estimator or recorded.estimators.get(group_id, rule.estimator)
        rule = replace(rule, estimator=cast("Estimator", estimator))
        groups[group_id] = state.score(_with_rewards(state, sealed, options), rule)
    return groups


def _with_rewards(state: GroupState, sealed: GroupSealed, options: ReplayOptions) -> GroupSealed:
    """The seal as recorded, or with the outside rewards in place of its own."""
    if options.rewards is None:
        return sealed
    return sealed.model_copy(update={"reward_ids": state.counted_rewards()})


def _replay_batch(
    recorded: _Recorded, number: int, groups: Mapping[str, ScoredGroup], options: ReplayOptions
) -> tuple[ReplayedBatch | None, list[Mismatch]]:
    manifest = recorded.manifests[number]
    try:
        remade, rows = remake_batch(manifest, groups, builder=options.builder, row_tokens=options.row_tokens)
    except BatchMismatchError as error:
        return None, [Mismatch("batch", str(number), manifest.rows_digest, "", str(error))]
    mismatches = []
    if remade != manifest:
        mismatches.append(Mismatch("batch", str(number), digest_of(manifest), digest_of(remade), "manifest"))
    there = recorded.rows.get(number, {})
    found = digest_of(*(there[index] for index in sorted(there)))
    if found != remade.rows_digest:
        mismatches.append(Mismatch("batch", str(number), found, remade.rows_digest, "rows on the log"))
    return ReplayedBatch(remade, tuple(rows)), mismatches


def _compare(kind: Kind, recorded: Mapping[str, str], replayed: Mapping[str, str]) -> list[Mismatch]:
    """Values that differ. What the log does not hold yet was still under way when it was copied."""
    return [
        Mismatch(kind, key, value, replayed.get(key, ""), "" if key in replayed else "cannot be made again")
        for key, value in sorted(recorded.items())
        if replayed.get(key) != value
    ]
