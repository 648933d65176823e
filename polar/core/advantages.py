"""Scores → advantages. The unit is the rollout, never a call, a branch or a row.

Let r be the scores of a group, μ their mean, σ their standard deviation (population form).

| estimator | advantage | source |
|---|---|---|
| `group_mean_std` | (r - μ) / (σ + eps) | GRPO: Shao et al. 2024, arXiv 2402.03300 |
| `group_mean` | r - μ | Dr. GRPO: Liu et al. 2025, arXiv 2503.20783 |
| `leave_one_out` | r - mean of the others | RLOO: Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740 |
| `leave_one_out_std` | (r - mean of the others) / (σ of the others + eps) | NVIDIA's slime bridge; NeMo RL |
| `max_rl` | (r - μ) / μ | MaxRL: Tajwar, Zeng et al. 2026, arXiv 2602.02710 |

RLOO is leave-one-out, one estimator by two names: r - (Σr - r) / (n - 1) = (r - μ) · n / (n - 1).
`leave_one_out_std` leaves a rollout undivided where its others have no spread, as NeMo RL does;
it is the only one that is neither centred nor bounded by the size of the group. `max_rl` is derived
for scores of 0 and 1 and holds for scores from 0 up; a group with a score below 0 is not trained
(`negative_scores`).

Single calls may be rewarded too. For one reward name, with c the weighted value of a call and b
the mean over rollouts of their mean over rewarded calls, the call's tokens get the rollout's
advantage plus c - b (`credits_of_calls`). The baseline gives each rollout one vote, and it does not
depend on how many calls a rollout makes, so that no length is preferred (verl-project/verl#7244
shows what happens otherwise); a reward acts on its own call alone, not on those before it.

Invariants: every result is finite; a group without spread, or with fewer than two scored
rollouts, has advantage 0 everywhere; the result does not depend on the order of the members.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from schemas.tasks import Estimator

GroupStatus = Literal["ok", "zero_variance", "single_survivor", "empty", "negative_scores"]

MAX_SCORE = 1e30
"""Scores beyond it are bad rewards: their advantages would not fit into float32 columns."""


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    """How scores become advantages."""

    estimator: Estimator = "group_mean_std"
    """See the module's table."""
    eps: float = 1e-4
    """Added to a standard deviation."""
    zero_variance_tol: float = 1e-6
    """A spread (max - min) up to this is none: rounding must not become an advantage."""


def advantages(
    scores: Sequence[float | None], rule: AdvantageRule | None = None
) -> tuple[list[float], GroupStatus]:
    """One advantage a rollout; None marks a rollout outside the baseline (advantage 0).

    Scores must lie within ±MAX_SCORE: the caller excludes others before.
    """
    rule = rule or AdvantageRule()
    scored = [score for score in scores if score is not None]
    nothing = [0.0] * len(scores)
    if len(scored) < 2:
        return nothing, "single_survivor" if scored else "empty"
    if not _has_spread(scored, rule):
        return nothing, "zero_variance"
    if rule.estimator == "max_rl" and min(scored) < 0:
        return nothing, "negative_scores"
    values = iter(
        _of_the_others(scored, rule) if rule.estimator == "leave_one_out_std" else _scaled(scored, rule)
    )
    return [0.0 if score is None else next(values) for score in scores], "ok"


def credits_of_calls(rewards: Sequence[Mapping[str, float]], rule: AdvantageRule) -> dict[str, float]:
    """What the rewards of one name add to the advantage of each rewarded call.

    `rewards`: call_id → weighted value, one mapping a scored rollout; calls without a reward are
    left out, and so are the rollouts without one. Empty where fewer than two rollouts have any,
    or where the values have no spread.
    """
    there = [own for own in rewards if own]
    if len(there) < 2 or not _has_spread([value for own in there for value in own.values()], rule):
        return {}
    baseline = math.fsum(math.fsum(own.values()) / len(own) for own in there) / len(there)
    return {call_id: value - baseline for own in there for call_id, value in own.items()}


def _has_spread(values: Sequence[float], rule: AdvantageRule) -> bool:
    return max(values) - min(values) > rule.zero_variance_tol


def _scaled(scores: Sequence[float], rule: AdvantageRule) -> list[float]:
    """(r - μ) over one number for the whole group."""
    mean, deviation = _moments(scores)
    scale = {
        "group_mean_std": deviation + rule.eps,
        "group_mean": 1.0,
        "leave_one_out": (len(scores) - 1) / len(scores),
        "max_rl": mean,
    }[rule.estimator]
    return [(score - mean) / scale for score in scores]


def _of_the_others(scores: Sequence[float], rule: AdvantageRule) -> list[float]:
    values = []
    for index, score in enumerate(scores):
        others = [*scores[:index], *scores[index + 1 :]]
        mean, deviation = _moments(others)
        scale = deviation + rule.eps if _has_spread(others, rule) else 1.0
        values.append((score - mean) / scale)
    return values


def _moments(scores: Sequence[float]) -> tuple[float, float]:
    """(mean, standard deviation); exactly rounded sums, so that order does not matter."""
    mean = math.fsum(scores) / len(scores)
    return mean, math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))
