"""The recorded demo is rebuilt from its archive, from other partitions, offline and with other rewards."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polar.archive.folder import read_events
from polar.core.replaying import ReplayOptions, replay
from schemas.rewards import Reward
from schemas.topics import BATCHES, CALLS, GROUP_EVENTS, GROUPS, POLICIES, REWARDS, TRAJECTORIES
from tests.e2e.conftest import Archive, QuickDemo
from tests.e2e.deployments import clean_environment, last_json, polar, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NEEDED = (CALLS, REWARDS, GROUP_EVENTS, TRAJECTORIES, GROUPS, BATCHES, POLICIES)
EXAMPLES = Path(__file__).parents[2] / "examples"


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
        assert step["live_loss"] is not None
        assert step["loss"] == pytest.approx(step["live_loss"], rel=1e-5, abs=1e-7)


def test_offline_training_with_another_builder_gives_the_same_losses(archive: Archive) -> None:
    """Gradients do not depend on how rows are built, so neither do the losses of later steps."""
    arguments = ("trainer", "--from", str(archive.folder), "--builder", "per_request", "--json")
    status, output = polar(*arguments, seconds=300)
    value = last_json(output)
    assert status == 0
    for step in value["steps"]:
        assert step["loss"] == pytest.approx(step["live_loss"], rel=1e-3, abs=1e-5)


def test_a_reward_program_attached_later_changes_scores_and_no_tree(archive: Archive) -> None:
    """A separate process, started after the run was over, against a copy of its topics."""
    prefix = "later"
    servers = archive.broker["POLAR_BOOTSTRAP_SERVERS"]
    copied, _ = polar(
        "replay", str(archive.folder), "--to-prefix", prefix, "--bootstrap-servers", servers, "--json"
    )
    assert copied == 0
    env = clean_environment(
        POLAR_BOOTSTRAP_SERVERS=servers, POLAR_TOPIC_PREFIX=prefix, POLAR_FETCH_MAX_WAIT_MS="20"
    )
    program = subprocess.Popen([sys.executable, str(EXAMPLES / "reward_length.py")], env=env)
    try:
        until(lambda: scored(servers, prefix) >= 48, 120, "scoring every trajectory")
    finally:
        program.send_signal(signal.SIGTERM)
        program.wait(30)
    status, output = polar(
        "replay", "--topics", prefix, "--bootstrap-servers", servers, "--evaluator", EVALUATOR, "--json"
    )
    value = last_json(output)
    assert status == 0
    assert value["digests"]["trajectories"] == value["recorded"]["trajectories"]
    assert value["digests"]["groups"] != value["recorded"]["groups"]
    assert {item["kind"] for item in value["mismatches"]} >= {"group", "batch"}


EVALUATOR = "length"


def scored(servers: str, prefix: str) -> int:
    """Trajectories that the later program has scored."""
    status, output = polar(
        "archive", "--to", "-", "--prefix", prefix, "--bootstrap-servers", servers, "--json"
    )
    return 0 if status else json.loads(output)["scored"]


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
