"""kill -9 in the middle of a demo: of single services, of `polar up`, of the demo itself."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from polar.supervision.lock import lock_owner
from tests.e2e.deployments import (
    broker_of,
    finish,
    journalled,
    last_json,
    left_over,
    polar,
    service_pid,
    start,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

SESSIONS = 48


def test_a_demo_survives_kill_9_of_everything(tmp_path: Path) -> None:
    """Stitcher, grouper and packer at random moments, then `polar up`, then the demo itself."""
    data_dir, log = tmp_path / "data", tmp_path / "stderr.log"
    arguments = ("demo", "--quick", "--json", "--data-dir", str(data_dir), "--time-limit", "900")
    demo = start(*arguments, log=log)
    try:
        until(lambda: journalled(data_dir) >= 6, 300, "the first answers")
        kill_stages(data_dir, moments=4)
        until(lambda: journalled(data_dir) >= 24, 120, "more answers")

        up = lock_owner(data_dir, "up")
        assert up is not None
        os.kill(up, signal.SIGKILL)
        # The demo starts it again; what was journalled before must still be on the log at the end.
        until(lambda: lock_owner(data_dir, "up") not in {None, up}, 120, "the restart of polar up")
        before = journalled(data_dir)
        until(lambda: journalled(data_dir) > before, 300, "answers after the restart")

        demo.kill()
        until(lambda: not left_over(data_dir), 30, "the end of everything the killed demo had started")
        demo.communicate(timeout=60)
    except BaseException:
        demo.send_signal(signal.SIGTERM)
        demo.communicate(timeout=60)
        raise

    # Only the data directory is named: what to do is kept there.
    again = start("demo", "--json", "--data-dir", str(data_dir), log=log)
    status, output = finish(again, 1000)
    assert status == 0, log.read_text()[-4000:]
    summary = last_json(output)
    assert summary["calls_lost"] == summary["calls_double"] == 0
    assert summary["unfaithful_tokens"] == summary["trained_twice"] == 0
    assert summary["engine_requests_unexplained"] == 0
    assert summary["steps"] == 2
    assert summary["policies_loaded"] >= 2
    assert summary["sessions"] >= SESSIONS
    assert left_over(data_dir) == []

    with broker_of(data_dir, tmp_path / "broker.log"):
        folder = str(tmp_path / "archive")
        status, _ = polar("archive", "--data-dir", str(data_dir), "--to", folder, "--json")
        assert status == 0
    status, output = polar("replay", folder, "--json")
    value = last_json(output)
    assert (status, value["mismatches"]) == (0, [])
    assert value["digests"] == value["recorded"]
    assert value["compared"]["batch"] == 2


def kill_stages(data_dir: Path, moments: int) -> None:
    """kill -9 stages of the stream at random moments, each at least once."""
    draw = random.Random(time.time_ns())
    stages = ["stitcher", "grouper", "packer"]
    victims = stages + [draw.choice(stages) for _ in range(moments - len(stages))]
    draw.shuffle(victims)
    for victim in victims:
        time.sleep(draw.uniform(0.2, 2.0))
        pid = until(lambda name=victim: service_pid(data_dir, name), 60, f"{victim} running")
        os.kill(pid, signal.SIGKILL)


def test_a_second_up_on_the_same_data_directory_is_refused(tmp_path: Path) -> None:
    from polar.supervision.lock import DataDirLock

    with DataDirLock(tmp_path, "up"):
        status, _ = polar("up", "--data-dir", str(tmp_path), "--model", str(tmp_path))
    assert status == 2
