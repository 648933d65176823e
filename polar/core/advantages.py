"""Scores → advantages. The unit is the rollout, never a call, a branch or a row.

Invariants: every result is finite; a group without spread, or with fewer than two scored
rollouts, has advantage 0 everywhere; the result does not depend on the order of the members.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Estimator = Literal["group_mean_std", "group_mean", "leave_one_out"]
GroupStatus = Literal["ok", "zero_variance", "single_survivor", "empty"]


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    """How scores become advantages."""

    estimator: Estimator = "group_mean_std"
    """`group_mean_std`: (r - mean) / (std + eps); `group_mean`: r - mean; `leave_one_out`:
    r - mean of the others."""
    eps: float = 1e-4
    """Added to the standard deviation (population form)."""
    zero_variance_tol: float = 1e-6
    """A spread (max - min) up to this is none: rounding must not become an advantage."""


def advantages(
    scores: Sequence[float | None], rule: AdvantageRule | None = None
) -> tuple[list[float], GroupStatus]:
    """One advantage a rollout; None marks a rollout outside the baseline (advantage 0).

    Scores must be finite: the caller excludes others before.
    """
    rule = rule or AdvantageRule()
    scored = [score for score in scores if score is not None]
    nothing = [0.0] * len(scores)
    if len(scored) < 2:
        return nothing, "single_survivor" if scored else "empty"
    if max(scored) - min(scored) <= rule.zero_variance_tol:
        return nothing, "zero_variance"
    mean = math.fsum(scored) / len(scored)
    scale = 1.0
    if rule.estimator == "group_mean_std":
        variance = math.fsum((score - mean) ** 2 for score in scored) / len(scored)
        scale = math.sqrt(variance) + rule.eps
    elif rule.estimator == "leave_one_out":
        # r - (sum - r) / (n - 1) equals (r - mean) · n / (n - 1)
        scale = (len(scored) - 1) / len(scored)
    return [0.0 if score is None else (score - mean) / scale for score in scores], "ok"
