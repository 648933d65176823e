"""Sums over the trained occurrences of a step, and the metrics they become.

Invariant: sums and maxima only, so the metrics depend neither on rows nor on chunks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polar.trainer.grpo_loss import LossLimits, LossTerms


@dataclass(slots=True)
class StepStats:
    """Filled occurrence by occurrence during the forward passes of one batch."""

    limits: LossLimits
    loss: float = 0.0
    trained_tokens: int = 0
    gap_tokens: int = 0
    """Occurrences of calls that were sampled wholly under the trainer's version."""
    max_logprob_gap: float = 0.0
    """Largest |new − engine| over them."""
    gap_sum: float = 0.0
    is_weight_sum: float = 0.0
    is_weight_max: float = 0.0
    capped: int = 0
    clipped: int = 0
    engine_ratio_max: float = 0.0
    """Largest exp(new − engine), before the cap."""

    def add(self, terms: LossTerms, new: Tensor, engine: Tensor, weights: Tensor, current: Tensor) -> None:
        """Count n occurrences; all tensors are [n] and detached but for `terms.loss`."""
        live = weights > 0
        count = int(live.sum())
        self.loss += float(terms.loss.detach())
        self.trained_tokens += count
        if not count:
            return
        is_weights, ratios = terms.is_weights[live], terms.ratios[live]
        difference = (new - engine)[live]
        self.is_weight_sum += float(is_weights.sum())
        self.is_weight_max = max(self.is_weight_max, float(is_weights.max()))
        self.engine_ratio_max = max(self.engine_ratio_max, float(torch.exp(difference.max())))
        self.capped += int((torch.exp(difference) > self.limits.is_cap).sum())
        outside = (ratios < 1.0 - self.limits.clip_low) | (ratios > 1.0 + self.limits.clip_high)
        self.clipped += int(outside.sum())
        gaps = difference[current[live]].abs()
        self.gap_tokens += gaps.numel()
        if gaps.numel():
            self.max_logprob_gap = max(self.max_logprob_gap, float(gaps.max()))
            self.gap_sum += float(gaps.sum())

    def metrics(self) -> dict[str, float]:
        """Finite numbers for PolicyPublished.metrics."""
        tokens = max(self.trained_tokens, 1)
        return {
            "loss": self.loss,
            "trained_tokens": float(self.trained_tokens),
            "gap_tokens": float(self.gap_tokens),
            "max_logprob_gap": self.max_logprob_gap,
            "mean_logprob_gap": self.gap_sum / max(self.gap_tokens, 1),
            "is_weight_mean": self.is_weight_sum / tokens,
            "is_weight_max": self.is_weight_max,
            "is_capped_share": self.capped / tokens,
            "clipped_share": self.clipped / tokens,
            "engine_ratio_max": self.engine_ratio_max,
        }
