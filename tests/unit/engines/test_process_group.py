"""However the leader ends, its group ends too."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

CHILD = """
import sys, time
from polar.engines.process_group import end_with_leader
end_with_leader()
print("watching", flush=True)
time.sleep(60)
"""
LEADER = """
import subprocess, sys, time
from polar.engines.process_group import announce_leader
{announce}
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def start(announce: str) -> tuple["subprocess.Popen[str]", int]:
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER.format(announce=announce), CHILD],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    leader.stdout.close()
    return leader, child


@pytest.fixture
def group() -> Iterator[list[int]]:
    """Process groups to be cleaned up."""
    groups: list[int] = []
    yield groups
    for leader in groups:
        try:
            os.killpg(leader, signal.SIGKILL)
        except ProcessLookupError:
            continue


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_child_ends_with_a_leader_that_is_killed(group: list[int]) -> None:
    leader, child = start("announce_leader()")
    group.append(leader.pid)
    leader.kill()
    leader.wait()
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def test_a_server_that_somebody_else_started_is_left_alone(group: list[int]) -> None:
    leader, child = start("")
    group.append(leader.pid)
    leader.kill()
    leader.wait()
    time.sleep(0.2)
    assert is_running(child)
