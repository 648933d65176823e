"""The three stages as processes on a real broker, killed with -9 at random moments of a run.

The log that they leave must replay to the digests that are on it, with every group in a batch.
"""

import asyncio
import time
from pathlib import Path
from random import Random

import pytest

from polar.core.replaying import Replay, replay
from polar.core.stage import LogRecord
from polar.kafka.reader import read_all, read_all_raw
from polar.kafka.writer import LogWriter
from polar.settings import LogSettings
from schemas.base import Event
from schemas.batches import BatchManifest, PackedRow
from schemas.group_events import GroupMember, GroupMembersFixed, GroupOpened
from schemas.ids import trajectory_id
from schemas.policies import PolicyPublished, PolicyVersion
from schemas.rewards import Reward, reward_id
from schemas.sessions import Outcome
from schemas.tasks import RewardSpec
from schemas.topics import (
    BATCHES,
    CALLS,
    DEAD_LETTERS,
    GROUP_EVENTS,
    GROUPS,
    POLICIES,
    REWARDS,
    TRAJECTORIES,
    TopicSpec,
)
from tests.topology.stage_processes import NAMES, StageProcesses
from tests.unit.core.call_records import SessionRecords

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

GROUPS_OF_A_RUN = 8
MEMBERS = 3
KILLS = 6
TOPICS = (CALLS, GROUP_EVENTS, TRAJECTORIES, REWARDS, GROUPS, BATCHES, POLICIES)
DEADLINE_SECONDS = 150.0


def _policy(step: int) -> PolicyPublished:
    version = PolicyVersion(lineage="a", step=step)
    parent = PolicyVersion(lineage="a", step=step - 1) if step else None
    return PolicyPublished(
        policy="policy", version=version, parent=parent, weights_path="w", weights_sha256="0"
    )


def _group(number: int, random: Random) -> list[Event]:
    """A group's events in an order that its writers could have produced."""
    group_id = f"task{number}"
    opened = GroupOpened(group_id=group_id, policy="policy", size=MEMBERS, reward=RewardSpec())
    queues: list[list[Event]] = []
    members = []
    for member in range(MEMBERS):
        session = SessionRecords(f"{group_id}/{member}/0/1")
        prompt = [1, 2, 3]
        for seq in range(3):
            sampled = [10 + random.randrange(3) for _ in range(4)]
            session.call(prompt, sampled, base=seq or None)
            prompt = [*prompt, *sampled, 4] if random.random() < 0.8 else [1, 2, 3, 5]
        reward = Reward(
            reward_id=reward_id(session.session_id, "outcome", "e", "1"),
            session_id=session.session_id,
            group_id=group_id,
            name="outcome",
            value=float(member == 0),
            evaluator="e",
        )
        queues.append([session.opened, *session.records, session.sealed(), reward])
        members.append(GroupMember(session_id=session.session_id, outcome=Outcome.COMPLETED))
    events: list[Event] = [opened]
    while any(queues):
        events.append(random.choice([queue for queue in queues if queue]).pop(0))
    return [*events, GroupMembersFixed(group_id=group_id, members=tuple(members))]


async def _read(log: LogSettings, *topics: TopicSpec) -> list[LogRecord]:
    return [record for topic in topics for record in await read_all(log, topic)]


async def _wait_for_batches(log: LogSettings, stages: StageProcesses, count: int) -> None:
    """Until so many manifests are on the log, each with all its rows."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        stages.check()
        events = [record.event for record in await _read(log, BATCHES)]
        rows = {(event.batch_number, event.index) for event in events if isinstance(event, PackedRow)}
        wanted = {event.number: event.row_count for event in events if isinstance(event, BatchManifest)}
        if len(wanted) >= count and len(rows) == sum(wanted.values()):
            return
        assert time.monotonic() < deadline, (len(wanted), *map(stages.tail, NAMES))
        await asyncio.sleep(0.3)


def _check(records: list[LogRecord]) -> Replay:
    result = replay(records)
    assert result.mismatches == ()
    sessions = {f"task{n}/{m}/0/1" for n in range(GROUPS_OF_A_RUN) for m in range(MEMBERS)}
    assert set(result.trajectories) == {trajectory_id(session_id) for session_id in sessions}
    batched = [group_id for batch in result.batches for group_id in batch.manifest.groups]
    assert sorted(batched) == sorted(result.groups) == [f"task{n}" for n in range(GROUPS_OF_A_RUN)]
    assert all(group.live for group in result.groups.values())
    sampled = GROUPS_OF_A_RUN * MEMBERS * 3 * 4
    assert sum(batch.manifest.trained_tokens for batch in result.batches) == sampled
    return result


async def test_stages_killed_at_random_moments_leave_the_digests(
    log_settings: LogSettings, tmp_path: Path
) -> None:
    random = Random(17)
    env = {"POLAR_PACKER_GROUPS_PER_BATCH": "2", "POLAR_PACKER_ROW_TOKENS": "32"}
    stages = StageProcesses(log_settings, tmp_path, **env)
    try:
        async with LogWriter(log_settings) as writer:
            await writer.write(_policy(0))
            for number in range(GROUPS_OF_A_RUN):
                for event in _group(number, random):
                    await writer.write(event)
                if number == 1:
                    await _wait_for_batches(log_settings, stages, 1)  # all three are at work
                if number >= 1 and stages.kills < KILLS:
                    await stages.kill(random.choice(NAMES))
            while stages.kills < KILLS:
                await stages.kill(random.choice(NAMES))
        await _wait_for_batches(log_settings, stages, GROUPS_OF_A_RUN // 2)
        assert set(stages.stop().values()) == {0}
    finally:
        stages.stop()
    _check(await _read(log_settings, *TOPICS))
    reasons = {raw.headers.get("reason") for raw in await read_all_raw(log_settings, DEAD_LETTERS)}
    assert reasons <= {"late_trajectory"}, "a trajectory that a killed stitcher wrote twice, at most"
