"""The recorded demo is rebuilt from its archive, from other partitions, offline and with other rewards."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polar.archive.folder import read_events
from polar.core.replaying import ReplayOptions, replay
from polar.kafka.reader import read_all
from polar.settings import LogSettings
from schemas.rewards import Reward
from schemas.topics import BATCHES, CALLS, GROUP_EVENTS, GROUPS, POLICIES, REWARDS, TRAJECTORIES
from tests.e2e.conftest import Archive, QuickDemo
from tests.e2e.deployments import clean_environment, last_json, polar, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NEEDED = (CALLS, REWARDS, GROUP_EVENTS, TRAJECTORIES, GROUPS, BATCHES, POLICIES)


def test_the_archive_holds_the_run(quick_demo: QuickDemo, archive: Archive) -> None:
    topics = archive.made["topics"]
    assert topics["trajectories.v1"] == quick_demo.summary["sessions"]
    # SessionOpened and SessionSealed stand around the calls of each session.
    assert topics["calls.v1"] == quick_demo.summary["calls"] + 2 * quick_demo.summary["sessions"]
    assert topics["groups.v1"] == 6


def test_the_archive_replays_to_the_live_digests(archive: Archive) -> None:
    status, output = polar("replay", str(archive.folder), "--json")
    value = last_json(output)
    assert (status, value["mismatches"]) == (0, [])
    assert value["digests"] == value["recorded"]
    assert value["compared"] == {"trajectory": 48, "group": 6, "batch": 2}


@pytest.mark.parametrize("group_partitions", [1, 7])
def test_a_copy_with_other_partitions_replays_to_the_same_digests(
    archive: Archive, group_partitions: int
) -> None:
    here = last_json(polar("replay", str(archive.folder), "--json")[1])
    status, output = polar(
        "replay", str(archive.folder), "--to-prefix", f"copy-{group_partitions}", "--json",
        "--group-partitions", str(group_partitions), "--session-partitions", "3",
        "--bootstrap-servers", archive.broker["POLAR_BOOTSTRAP_SERVERS"],
    )  # fmt: skip
    value = last_json(output)
    assert (status, value["mismatches"]) == (0, [])
    assert value["digests"] == value["recorded"] == here["digests"]


def test_a_changed_archive_is_told(archive: Archive, tmp_path: Path) -> None:
    for path in archive.folder.iterdir():
        os.link(path, tmp_path / path.name)
    segment = next(tmp_path.glob("calls.v1-*"))
    data = segment.read_bytes()
    segment.unlink()
    segment.write_bytes(data[:-4] + b"\0\0\0\0")
    status, _ = polar("replay", str(tmp_path), "--json")
    assert status == 1


def test_offline_training_gives_the_losses_of_the_live_run(archive: Archive) -> None:
    status, output = polar("trainer", "--from", str(archive.folder), "--json", seconds=300)
    value = last_json(output)
    assert (status, value["equal"]) == (0, True)
    assert len(value["steps"]) == 2
    for step in value["steps"]:
        assert step["loss"] == pytest.approx(step["live_loss"], rel=1e-5, abs=1e-6)
        assert step["grad_norm"] == pytest.approx(step["live_grad_norm"], rel=1e-5)
        assert step["grad_norm"] > 0


def test_offline_training_with_another_builder_gives_the_same_gradients(archive: Archive) -> None:
    arguments = ("trainer", "--from", str(archive.folder), "--builder", "per_request", "--json")
    status, output = polar(*arguments, seconds=300)
    value = last_json(output)
    assert status == 0
    for step in value["steps"]:
        assert step["loss"] == pytest.approx(step["live_loss"], abs=1e-6)
        assert step["grad_norm"] == pytest.approx(step["live_grad_norm"], rel=1e-3)


def test_a_reward_program_attached_later_changes_scores_and_no_tree(archive: Archive, tmp_path: Path) -> None:
    """A separate process, started after the run was over, against a copy of its topics."""
    servers = archive.broker["POLAR_BOOTSTRAP_SERVERS"]
    copied, _ = polar(
        "replay", str(archive.folder), "--to-prefix", "later", "--bootstrap-servers", servers, "--json"
    )
    assert copied == 0
    log = LogSettings(bootstrap_servers=servers, topic_prefix="later", fetch_max_wait_ms=20)
    env = clean_environment(
        POLAR_BOOTSTRAP_SERVERS=servers, POLAR_TOPIC_PREFIX="later", POLAR_FETCH_MAX_WAIT_MS="20"
    )
    program = tmp_path / "late_reward.py"
    program.write_text(LATE_PROGRAM)
    with (tmp_path / "late.log").open("w") as output:
        process = subprocess.Popen([sys.executable, str(program)], env=env, stderr=output)
    try:
        until(lambda: len(late_rewards(log)) >= 48, 120, "scoring every trajectory")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    status, output_text = polar(
        "replay", "--topics", "later", "--bootstrap-servers", servers, "--evaluator", "late", "--json"
    )
    value = last_json(output_text)
    assert status == 0
    assert value["digests"]["trajectories"] == value["recorded"]["trajectories"]
    assert value["digests"]["groups"] != value["recorded"]["groups"]
    assert value["digests"]["batches"] != value["recorded"]["batches"]

    records = read_events(archive.folder, *NEEDED)
    plain, other = replay(records), replay(records, ReplayOptions(rewards=tuple(late_rewards(log))))
    for group_id, group in plain.groups.items():
        changed = other.groups[group_id]
        assert changed.tree == group.tree
        scores = {member.session_id: member.score for member in changed.members}
        assert scores == {reward.session_id: reward.value for reward in late_rewards(log, group_id)}
        assert sum(member.advantage for member in changed.members) == pytest.approx(0, abs=1e-6)


LATE_PROGRAM = """
from polar.rewards import TrajectoryView, reward, run

@reward("outcome", evaluator="late", version="1")
async def late(trajectory: TrajectoryView) -> float:
    return float(len(trajectory.last_answer) % 5)

if __name__ == "__main__":
    run([__file__])
"""


def late_rewards(log: LogSettings, group_id: str | None = None) -> list[Reward]:
    """What the late program has written."""
    rewards = [record.event for record in asyncio.run(read_all(log, REWARDS))]
    return [
        reward
        for reward in rewards
        if isinstance(reward, Reward) and reward.evaluator == "late" and group_id in (None, reward.group_id)
    ]


def test_other_rewards_leave_members_order_and_trees(archive: Archive) -> None:
    records = read_events(archive.folder, *NEEDED)
    rewards = [record.event for record in records if isinstance(record.event, Reward)]
    turned = tuple(reward.model_copy(update={"value": 1.0 - reward.value}) for reward in rewards)
    plain, other = replay(records), replay(records, ReplayOptions(rewards=turned))
    assert other.trajectories == plain.trajectories
    assert other.groups.keys() == plain.groups.keys()
    for group_id, group in plain.groups.items():
        changed = other.groups[group_id]
        assert changed.tree == group.tree
        assert [member.session_id for member in changed.members] == [m.session_id for m in group.members]
        if group.live:
            advantages = [member.advantage for member in group.members]
            assert [member.advantage for member in changed.members] == pytest.approx([-a for a in advantages])
    assert [batch.manifest.groups for batch in other.batches] == [b.manifest.groups for b in plain.batches]
