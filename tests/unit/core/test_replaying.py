"""Replay notices what does not follow from the recorded decisions."""

from random import Random

import pytest

from polar.core.batching import BatchRule
from polar.core.grouper_stage import TOPICS, GrouperCore
from polar.core.packer_stage import PackerCore
from polar.core.replaying import ReplayOptions, batches_digest, replay
from polar.core.stage import LogRecord
from polar.core.stitcher_stage import StitcherCore
from schemas.base import Event
from schemas.batches import BatchManifest, Builder, PackedRow
from schemas.columns import FloatColumn
from schemas.group_events import GroupMember, GroupMembersFixed, GroupOpened
from schemas.groups import ScoredGroup
from schemas.rewards import Reward, reward_id
from schemas.sessions import Outcome
from schemas.tasks import RewardSpec
from schemas.topics import BATCHES, CALLS, GROUPS, POLICIES
from schemas.trajectories import Trajectory, UsabilityRules
from tests.property.stream_world import MemoryLog, StageRun, run_until_quiet
from tests.unit.core.call_records import SessionRecords


def reward(session_id: str, value: float, evaluator: str = "e") -> Reward:
    return Reward(
        reward_id=reward_id(session_id, "outcome", evaluator, "1"),
        session_id=session_id,
        group_id="t",
        name="outcome",
        value=value,
        evaluator=evaluator,
    )


def recorded(rules: UsabilityRules | None = None, kind: str = "agent") -> list[LogRecord]:
    log = MemoryLog()
    members = []
    log.write(GroupOpened(group_id="t", policy="policy", size=2, reward=RewardSpec()))
    for member in range(2):
        session = SessionRecords(f"t/{member}/0/1")
        log.write(session.opened)
        log.write(session.call([1, 2], [3, 4 + member], kind=kind))
        log.write(session.sealed())
        log.write(reward(session.session_id, float(member)))
        members.append(GroupMember(session_id=session.session_id, outcome=Outcome.COMPLETED))
    log.write(GroupMembersFixed(group_id="t", members=tuple(members)))
    rule = BatchRule(groups_per_batch=1, row_tokens=8)
    runs = [
        StageRun(log, lambda: StitcherCore(rules=rules), (CALLS,)),
        StageRun(log, GrouperCore, TOPICS),
        StageRun(log, lambda: PackerCore(rule), (GROUPS, BATCHES, POLICIES)),
    ]
    run_until_quiet(runs, Random(1), crash_rate=0.0, steps=10)
    return log.records()


def changed(records: list[LogRecord], kind: type[Event], **update: object) -> list[LogRecord]:
    """The log with one recorded value falsified."""
    done = False
    out = []
    for record in records:
        event = record.event
        if isinstance(event, kind) and not done:
            done = True
            event = event.model_copy(update=update)
        out.append(LogRecord(record.partition, record.offset, record.key, event, record.headers))
    assert done
    return out


def test_a_faithful_replay_agrees_with_everything() -> None:
    records = recorded()
    result = replay(records)
    assert ReplayOptions().is_faithful
    assert result.mismatches == ()
    assert result.compared == {"trajectory": 2, "group": 1, "batch": 1}
    manifests = [record.event for record in records if isinstance(record.event, BatchManifest)]
    assert result.digests()["batches"] == batches_digest(manifests)
    assert len(result.batches[0].rows) == manifests[0].row_count > 0


def test_calls_are_judged_by_the_rules_of_the_run() -> None:
    """Side calls are trained in this run; a replay needs no setting to know it."""
    rules = UsabilityRules(train_kinds=("agent", "auxiliary"))
    result = replay(recorded(rules, kind="auxiliary"))
    assert result.mismatches == ()
    assert [call.untrainable for each in result.trajectories.values() for call in each.calls] == [None, None]
    left_out = replay(recorded(kind="auxiliary"))
    assert left_out.mismatches == ()
    assert {call.untrainable for each in left_out.trajectories.values() for call in each.calls} == {
        "auxiliary"
    }


def test_every_falsified_value_is_named() -> None:
    records = recorded()
    row = next(record.event for record in records if isinstance(record.event, PackedRow))
    weights = FloatColumn([weight * 2 for weight in row.weights])
    for kind, update, found in (
        (Trajectory, {"reason": "x"}, ["trajectory"]),
        (ScoredGroup, {"reason": "x"}, ["group"]),
        (BatchManifest, {"trained_tokens": 99}, ["batch"]),
        (PackedRow, {"weights": weights}, ["batch"]),
    ):
        result = replay(changed(records, kind, **update))
        assert [mismatch.kind for mismatch in result.mismatches] == found


def test_what_cannot_be_made_again_is_named() -> None:
    records = [record for record in recorded() if record.partition.topic != CALLS.suffix]
    result = replay(records)
    details = {(mismatch.kind, mismatch.detail) for mismatch in result.mismatches}
    assert ("trajectory", "cannot be made again") in details
    assert result.trajectories == {}


def test_outside_rewards_change_scores_and_rows_and_no_tree() -> None:
    records = recorded()
    faithful = replay(records)
    again = replay(records, ReplayOptions(rewards=(reward("t/0/0/1", 5.0, "x"), reward("t/1/0/1", 1.0, "x"))))
    assert [member.score for member in again.groups["t"].members] == [5.0, 1.0]
    assert [member.advantage > 0 for member in again.groups["t"].members] == [True, False]
    assert again.groups["t"].tree == faithful.groups["t"].tree
    assert again.digests()["trajectories"] == faithful.digests()["trajectories"]
    assert again.digests()["batches"] != faithful.digests()["batches"]
    assert again.batches[0].rows[0].advantages != faithful.batches[0].rows[0].advantages


@pytest.mark.parametrize("builder", ["per_request", "prefix_merging", "prefix_tree"])
def test_another_builder_keeps_what_is_trained(builder: Builder) -> None:
    records = recorded()
    again = replay(records, ReplayOptions(builder=builder, row_tokens=100))
    (batch,) = again.batches
    assert (batch.manifest.builder, batch.manifest.row_tokens) == (builder, 100)
    assert batch.manifest.trained_tokens == replay(records).batches[0].manifest.trained_tokens


def test_another_estimator_is_used_when_asked_for() -> None:
    again = replay(recorded(), ReplayOptions(estimator="group_mean"))
    assert [member.advantage for member in again.groups["t"].members] == [-0.5, 0.5]
