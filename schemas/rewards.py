"""polar.rewards.v1: written by evaluators and by any outside program."""

import math
from typing import Any, Literal, Self

from pydantic import model_validator

from schemas.base import Event
from schemas.ids import derived_id


def reward_id(
    session_id: str, name: str, evaluator: str, version: str, call_ids: tuple[str, ...] = ()
) -> str:
    """Id of a reward. The value is no part of it: scoring again the same way is a duplicate."""
    return derived_id("reward", session_id, name, evaluator, version, *call_ids)


class Reward(Event):
    """A score for a session, or for single calls of it."""

    type: Literal["Reward"] = "Reward"
    reward_id: str
    session_id: str
    group_id: str
    call_ids: tuple[str, ...] = ()
    """Empty: the whole session. The reward counts once for each of these calls."""
    name: str
    value: float
    evaluator: str
    """Who says so."""
    version: str = "1"
    details: dict[str, Any] = {}

    @model_validator(mode="after")
    def _finite(self) -> Self:
        if not math.isfinite(self.value):
            raise ValueError(f"reward value {self.value} is not finite")
        return self
