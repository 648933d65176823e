"""Rewards from outside: score trajectories in a program of your own.

    from polar.rewards import TrajectoryView, reward, run

    @reward("brevity", evaluator="my-program", version="1")
    async def brevity(trajectory: TrajectoryView) -> float:
        return 1.0 / len(trajectory.calls)

    if __name__ == "__main__":
        run([__file__])

It may be started before, during or after a run, on any machine that reaches the broker
(POLAR_BOOTSTRAP_SERVERS, POLAR_TOPIC_PREFIX); `python -m polar.rewards FILE.py …` starts several
files at once. What counts for a group is what its task's reward spec names.
"""

from polar.rewards.program import RewardProgram, reward
from polar.rewards.running import run
from polar.rewards.view import CallView, TrajectoryView

__all__ = ["CallView", "RewardProgram", "TrajectoryView", "reward", "run"]
