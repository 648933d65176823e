"""A reward program as a process of its own, started later than what it scores."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from polar.core.stage import Emit
from polar.kafka.reader import read_all
from polar.kafka.writer import LogWriter
from polar.settings import LogSettings
from schemas.rewards import Reward
from schemas.topics import REWARDS
from tests.unit.rewards.test_reward_programs import trajectory

pytestmark = pytest.mark.kafka
ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
from polar.rewards import reward

@reward("length", evaluator="outside", version="1")
async def length(trajectory):
    if trajectory.session_id == "t/3/0/1":
        raise ValueError("not this one")
    return float(len(trajectory.last_answer))
"""


async def start(log: LogSettings, file: Path) -> asyncio.subprocess.Process:
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith("POLAR_")},
        "POLAR_BOOTSTRAP_SERVERS": log.bootstrap_servers,
        "POLAR_TOPIC_PREFIX": log.topic_prefix,
        "POLAR_SESSION_PARTITIONS": str(log.session_partitions),
        "POLAR_GROUP_PARTITIONS": str(log.group_partitions),
    }
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "polar.rewards", str(file), env=env, cwd=ROOT
    )


async def rewards(log: LogSettings, at_least: int) -> list[Reward]:
    async with asyncio.timeout(60):
        while True:
            found = [r.event for r in await read_all(log, REWARDS) if isinstance(r.event, Reward)]
            if len(found) >= at_least:
                return found
            await asyncio.sleep(0.1)


async def test_it_scores_what_came_before_it_and_what_comes_after(
    log_settings: LogSettings, tmp_path: Path
) -> None:
    file = tmp_path / "length.py"
    file.write_text(PROGRAM)
    values = [trajectory((None, 0, [], "x" * n), session_id=f"t/{n}/0/1") for n in range(6)]
    async with LogWriter(log_settings) as writer:
        await writer.write_many([Emit(value) for value in values[:4]])
        program = await start(log_settings, file)
        try:
            await rewards(log_settings, 3)
            await writer.write(values[4])
            await rewards(log_settings, 4)
        finally:
            program.kill()
            await program.wait()
        program = await start(log_settings, file)
        try:
            await writer.write(values[5])
            found = await rewards(log_settings, 5)
        finally:
            program.terminate()
            assert await program.wait() == 0
    assert sorted((reward.session_id, reward.value) for reward in found) == [
        (f"t/{n}/0/1", float(n)) for n in (0, 1, 2, 4, 5)
    ], "each once, also after a kill -9"
