"""Stitcher, grouper and packer race over one log and are killed at random moments.

Whatever happens, the log obeys its decisions: replaying it gives the recorded trajectories,
groups and batches byte for byte, every closed session has one trajectory, every sealed group is
in exactly one batch or excluded, and every batch has all its rows.
"""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.core.batching import BatchRule, staleness_of
from polar.core.grouper_stage import GrouperCore
from polar.core.packer_stage import PackerCore
from polar.core.replaying import Replay, ReplayOptions, replay
from polar.core.staleness import PolicyLineages
from polar.core.stitcher_stage import StitcherCore
from schemas.base import digest_of
from schemas.batches import BatchManifest, PackedRow
from schemas.calls import SessionSealed
from schemas.group_events import GroupMember, GroupMembersFixed, GroupOpened, GroupSealed
from schemas.groups import ScoredGroup
from schemas.ids import trajectory_id
from schemas.policies import PolicyPublished, PolicyVersion
from schemas.rewards import Reward, reward_id
from schemas.sessions import Outcome
from schemas.tasks import RewardSpec
from schemas.topics import BATCHES, CALLS, GROUP_EVENTS, GROUPS, POLICIES, REWARDS, TRAJECTORIES
from schemas.trajectories import Trajectory
from tests.property.session_scripts import LAWS, Script, make_world
from tests.property.stream_world import MemoryLog, StageRun, run_until_quiet

RULE = BatchRule(groups_per_batch=2, row_tokens=24, max_staleness=2)


def reward(session_id: str, value: float, *, evaluator: str = "e", name: str = "outcome") -> Reward:
    return Reward(
        reward_id=reward_id(session_id, name, evaluator, "1"),
        session_id=session_id,
        group_id=session_id.split("/", maxsplit=1)[0],
        name=name,
        value=value,
        evaluator=evaluator,
    )


def policy(step: int) -> PolicyPublished:
    return PolicyPublished(
        policy="policy",
        version=PolicyVersion(lineage="a", step=step),
        parent=PolicyVersion(lineage="a", step=step - 1) if step else None,
        weights_path="w",
        weights_sha256="0",
    )


class Outside:
    """Gateways, scheduler, evaluators and trainer: write their events in a legal random order."""

    def __init__(self, log: MemoryLog, groups: list[list[Script]], random: Random) -> None:
        self.log, self.random = log, random
        self.queues: list[list[object]] = []
        for sessions in groups:
            group_id = sessions[0].records.group_id
            opened = GroupOpened(
                group_id=group_id,
                policy="policy",
                size=len(sessions),
                reward=RewardSpec(optional=("style",), timeout_seconds=100),
            )
            log.write(opened)
            members = []
            for script in sessions:
                closing = script.closing
                outcome = closing.outcome if isinstance(closing, SessionSealed) else Outcome.INFRA_ERROR
                members.append(GroupMember(session_id=script.records.session_id, outcome=outcome))
                rewards = [reward(script.records.session_id, random.choice([0.0, 1.0]))] * random.randint(
                    0, 2
                )
                self.queues.append([*self._doubled(script.events), *rewards])
            fixed = GroupMembersFixed(group_id=group_id, members=tuple(members))
            self.queues.append([fixed, *[opened] * random.randint(0, 1)])
        self.queues.append([policy(step) for step in range(6)])

    def _doubled(self, events: list[object]) -> list[object]:
        """A gateway that restarts sends the end of its spool again."""
        if self.random.random() < 0.3:
            at = self.random.randrange(len(events))
            return [*events[: at + 1], *events[self.random.randint(0, at) :]]
        return events

    def write_some(self) -> bool:
        queues = [queue for queue in self.queues if queue]
        if queues:
            self.log.write(self.random.choice(queues).pop(0))
        return bool(queues)


def run_all(groups: list[list[Script]], seed: int, crash_rate: float) -> tuple[MemoryLog, list[StageRun]]:
    random = Random(seed)
    log = MemoryLog()
    outside = Outside(log, groups, random)
    runs = [
        StageRun(log, StitcherCore, (CALLS,)),
        StageRun(log, GrouperCore, (GROUP_EVENTS, TRAJECTORIES, REWARDS)),
        StageRun(log, lambda: PackerCore(RULE), (GROUPS, BATCHES, POLICIES), from_start=(POLICIES,)),
    ]
    now = 0.0
    while outside.write_some():
        now += 0.5
        random.choice(runs).step(random, now, crash_rate=crash_rate)
    run_until_quiet(runs, random, crash_rate=crash_rate, steps=60)
    return log, runs


def check(log: MemoryLog, groups: list[list[Script]]) -> Replay:
    result = replay(log.records())
    assert result.mismatches == ()
    trajectories = {event.trajectory_id: event for event in log.of(Trajectory)}
    assert set(trajectories) == {
        trajectory_id(script.records.session_id) for sessions in groups for script in sessions
    }
    for event in log.of(Trajectory):
        assert digest_of(event) == digest_of(trajectories[event.trajectory_id])
    scored = {event.group_id: event for event in log.of(ScoredGroup)}
    assert set(scored) == {sessions[0].records.group_id for sessions in groups}
    for event in log.of(ScoredGroup):
        assert digest_of(event) == digest_of(scored[event.group_id])
    manifests: dict[int, BatchManifest] = {}
    for manifest in log.of(BatchManifest):
        manifests.setdefault(manifest.number, manifest)
    assert sorted(manifests) == list(range(len(manifests)))
    batched = [group_id for number in sorted(manifests) for group_id in manifests[number].groups]
    excluded = [item.id for manifest in manifests.values() for item in manifest.excluded]
    assert len(batched + excluded) == len(set(batched + excluded))
    lineages = PolicyLineages(
        event for event in log.of(PolicyPublished) if isinstance(event, PolicyPublished)
    )
    left = [scored[group_id] for group_id in set(scored) - set(batched) - set(excluded)]
    fresh = [g for g in left if not g.live or staleness_of(g, lineages) <= RULE.max_staleness]
    assert len(fresh) < RULE.groups_per_batch
    for number, manifest in manifests.items():
        rows = {row.index: row for row in log.of(PackedRow) if row.batch_number == number}
        assert sorted(rows) == list(range(manifest.row_count))
        assert digest_of(*(rows[index] for index in sorted(rows))) == manifest.rows_digest
        assert all(len(row.tokens) <= RULE.row_tokens for row in rows.values())
    return result


WORLDS = settings(LAWS, max_examples=60)
SEEDS = st.integers(0, 2**32)


@WORLDS
@given(SEEDS)
def test_killed_stages_leave_a_log_that_replays_byte_for_byte(seed: int) -> None:
    groups = make_world(seed)
    log, _ = run_all(groups, seed, crash_rate=0.2)
    check(log, groups)


@WORLDS
@given(SEEDS)
def test_crashes_change_no_trajectory(seed: int) -> None:
    groups = make_world(seed)
    calm = check(run_all(groups, seed, crash_rate=0.0)[0], groups)
    wild = check(run_all(groups, seed + 1, crash_rate=0.3)[0], groups)
    assert calm.digests()["trajectories"] == wild.digests()["trajectories"]


@WORLDS
@given(SEEDS)
def test_another_partition_count_and_interleaving_replays_the_same(seed: int) -> None:
    groups = make_world(seed)
    log, _ = run_all(groups, seed, crash_rate=0.1)
    here = check(log, groups)
    copied = log.copied(groups=5, sessions=1)
    there = replay(copied.records())
    assert there.mismatches == ()
    assert here.digests() == there.digests()


@WORLDS
@given(SEEDS)
def test_outside_rewards_change_scores_and_rows_but_no_tree(seed: int) -> None:
    groups = make_world(seed)
    log, _ = run_all(groups, seed, crash_rate=0.0)
    recorded = check(log, groups)
    rewards = tuple(
        reward(script.records.session_id, float(member), evaluator="later")
        for sessions in groups
        for member, script in enumerate(sessions)
    )
    again = replay(log.records(), ReplayOptions(rewards=rewards))
    assert again.digests()["trajectories"] == recorded.digests()["trajectories"]
    for group_id, group in again.groups.items():
        assert group.tree == recorded.groups[group_id].tree
        for member in group.members:
            assert set(member.rewards.values()) <= {float(member.session_id.split("/")[1])}
    assert [batch.manifest.groups for batch in again.batches] == [
        batch.manifest.groups for batch in recorded.batches
    ]


def test_commits_move_up_once_everything_is_done() -> None:
    """Memory and the committed offsets do not stay behind when all keys are closed."""
    from tests.unit.core.call_records import SessionRecords

    groups = []
    for number in range(4):
        session = SessionRecords(f"task{number}/0/0/1")
        session.call([1, 2], [3])
        groups.append([Script(session, session.sealed())])
    log, runs = run_all(groups, 7, crash_rate=0.1)
    stitcher, grouper, packer = runs
    for run in (stitcher, grouper):
        run.commit()
        assert all(run.committed.get(p, 0) == log.end(p) for p in run.partitions)
    packer.commit()
    assert all(packer.committed.get(p, 0) == log.end(p) for p in log.partitions_of(GROUPS))
    last = max(
        record.offset
        for record in log.partitions[log.partitions_of(BATCHES)[0]]
        if isinstance(record.event, BatchManifest)
    )
    assert packer.committed[log.partitions_of(BATCHES)[0]] == last
    assert len(log.of(GroupSealed)) >= 4


@pytest.mark.parametrize("seed", range(3))
def test_the_world_really_crashes(seed: int) -> None:
    from tests.unit.core.call_records import SessionRecords

    session = SessionRecords("task0/0/0/1")
    session.call([1, 2], [3])
    _, runs = run_all([[Script(session, session.sealed())]], seed, crash_rate=0.5)
    assert sum(run.crashes for run in runs) > 5
