"""`@reward`: a function from trajectory to score, with the names under which it scores."""

import importlib.util
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar.errors import SettingsError
from polar.rewards.view import TrajectoryView
from schemas.base import digest
from schemas.rewards import Reward, reward_id
from schemas.sessions import Outcome

Score = float | Mapping[str, float]
"""Of a session; or call_id → value, of single calls of it."""
Scores = Score | Mapping[str, Score] | None
RewardFunction = Callable[[TrajectoryView], Awaitable[Scores]]

SCORED_OUTCOMES = (Outcome.COMPLETED, Outcome.AGENT_ERROR)
"""Other sessions count by their outcome alone."""


class InvalidScoreError(ValueError):
    """A reward function returned something that is no score."""


@dataclass(frozen=True, slots=True)
class RewardProgram:
    """A reward function with what the log must know about it."""

    function: RewardFunction
    names: tuple[str, ...]
    """Rewards that it gives; it may leave names out."""
    evaluator: str
    version: str
    outcomes: tuple[Outcome, ...]
    """Sessions that it scores."""
    timeout_seconds: float

    async def __call__(self, trajectory: TrajectoryView) -> Scores:
        """The function itself."""
        return await self.function(trajectory)

    def reward_id(self, session_id: str, name: str, *call_ids: str) -> str:
        """Deterministic: scoring a session again is a duplicate, not a second reward."""
        return reward_id(session_id, name, self.evaluator, self.version, call_ids)

    def rewards(self, trajectory: TrajectoryView, scores: Scores) -> list[Reward]:
        """Events of a result, in order of `names`. Raises InvalidScoreError."""
        if scores is None:
            return []
        if not isinstance(scores, Mapping):
            if len(self.names) != 1:
                raise InvalidScoreError(f"{self.evaluator} gives {self.names}: return a dict of them")
            scores = {self.names[0]: scores}
        for name in scores:
            if name not in self.names:
                raise InvalidScoreError(f"{self.evaluator} does not declare the reward {name!r}")
        return [
            Reward(
                reward_id=self.reward_id(trajectory.session_id, name, *call_ids),
                session_id=trajectory.session_id,
                group_id=trajectory.group_id,
                call_ids=call_ids,
                name=name,
                value=value,
                evaluator=self.evaluator,
                version=self.version,
            )
            for name in self.names
            if name in scores
            for call_ids, value in self._values(trajectory, name, scores[name])
        ]

    def _values(
        self, trajectory: TrajectoryView, name: str, score: Score
    ) -> list[tuple[tuple[str, ...], float]]:
        """(call ids, value): one of the whole session, or one a call."""
        if not isinstance(score, Mapping):
            return [((), self._number(name, score))]
        strangers = set(score) - {call.call_id for call in trajectory.calls}
        if strangers:
            raise InvalidScoreError(
                f"{self.evaluator}: {name} scores {sorted(strangers)}, no calls of {trajectory.session_id}"
            )
        return [((call_id,), self._number(f"{name} of {call_id}", value)) for call_id, value in score.items()]

    def _number(self, what: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidScoreError(f"{self.evaluator}: {what} is {value!r}, not a finite number")
        return float(value)


def reward(
    *names: str,
    evaluator: str,
    version: str = "1",
    outcomes: Sequence[Outcome] = SCORED_OUTCOMES,
    timeout_seconds: float = 300.0,
) -> Callable[[RewardFunction], RewardProgram]:
    """Make an async function a reward program.

    `names`: the rewards that it gives; the function returns a number when there is one name, else
    a dict of them, or None for no score. In the dict a name may hold a dict of call ids instead of
    a number: rewards for single calls, of a name that the task lists as `per_call`. `evaluator`
    and `version` are part of every reward's id: count `version` up when the function changes, or
    old scores stand.
    """
    if not names:
        raise SettingsError(
            f"@reward of {evaluator}: name the rewards that it gives, e.g. @reward('outcome')"
        )

    def decorate(function: RewardFunction) -> RewardProgram:
        return RewardProgram(function, names, evaluator, version, tuple(outcomes), timeout_seconds)

    return decorate


def load_programs(path: Path) -> list[RewardProgram]:
    """Run a Python file and take its reward programs. Raises SettingsError when it has none."""
    name = f"polar_reward_{path.stem}_{digest(str(path.absolute()).encode())[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SettingsError(f"{path} is no Python file")
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    programs = [value for value in vars(module).values() if isinstance(value, RewardProgram)]
    if not programs:
        raise SettingsError(f"{path} defines no reward: decorate an async function with polar.rewards.reward")
    return programs
