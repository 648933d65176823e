"""Evaluator `command`: its last line of output as JSON gives the scores, else its exit status."""

import json
import math
from collections.abc import Mapping

from polar.errors import RuntimeFailedError
from polar.rollout.harnesses.shell import session_environment
from polar.rollout.processes import CommandResult
from polar.rollout.runtimes.base import Runtime
from schemas.base import digest_of
from schemas.nodes import StartSession
from schemas.rewards import Reward, reward_id
from schemas.sessions import Outcome

EVALUATOR = "command"
"""Reward.evaluator of these scores."""


class EvaluatorFailedError(RuntimeFailedError):
    """The evaluator gave no score."""


async def evaluate(start: StartSession, runtime: Runtime, outcome: Outcome) -> list[Reward]:
    """Run the task's evaluator in the session's runtime. Raises RuntimeFailedError."""
    spec = start.task.evaluator
    result = await runtime.run(
        spec.command,
        env=session_environment(start) | {"POLAR_OUTCOME": outcome.value},
        timeout_seconds=spec.timeout_seconds,
        name="evaluator",
    )
    version = digest_of(spec)[:12]
    return [
        Reward(
            reward_id=reward_id(start.session_id, name, EVALUATOR, version),
            session_id=start.session_id,
            group_id=start.group_id,
            name=name,
            value=value,
            evaluator=EVALUATOR,
            version=version,
        )
        for name, value in scores_of(result, spec.reward).items()
    ]


def scores_of(result: CommandResult, default_name: str) -> Mapping[str, float]:
    """Scores by reward name. Raises EvaluatorFailedError."""
    if result.status is None:
        raise EvaluatorFailedError(f"the evaluator was not done after {result.seconds:.1f} s")
    lines = result.stdout_tail.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        value = None
    if _is_number(value):
        value = {default_name: value}
    if not isinstance(value, dict):
        return {default_name: 1.0 if result.status == 0 else 0.0}
    for name, score in value.items():
        if not _is_number(score) or not math.isfinite(score):
            raise EvaluatorFailedError(f"the evaluator's score {name!r} is {score!r}, not a finite number")
    return {name: float(score) for name, score in value.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
