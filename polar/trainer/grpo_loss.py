"""The GRPO objective as a pure function of tensors.

    loss = - sum over occurrences of  weight * w * min(r * A, clip(r, 1 - low, 1 + high) * A)
    r = exp(new - old),  w = min(exp(old - engine), C) detached

Invariant: a plain sum. Every denominator is inside `weights`, so the result depends neither
on the order of occurrences nor on how they are split into rows, chunks or ranks; and an
occurrence of weight 0 contributes exactly 0 to loss and gradient, whatever its log-probs are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Loss of some occurrences, and what its parts were."""

    loss: Tensor
    """Scalar with gradient."""
    is_weights: Tensor
    """[n] truncated importance weights w; 1 where the occurrence has weight 0."""
    ratios: Tensor
    """[n] r, detached; 1 where the occurrence has weight 0."""


@dataclass(frozen=True, slots=True)
class LossLimits:
    """Bounds of the objective."""

    clip_low: float
    clip_high: float
    is_cap: float
    """C."""


def grpo_loss(
    new_logprobs: Tensor,
    engine_logprobs: Tensor,
    weights: Tensor,
    advantages: Tensor,
    limits: LossLimits,
    old_logprobs: Tensor | None = None,
) -> LossTerms:
    """The loss over n occurrences; all tensors are [n] float32.

    `old_logprobs` are the log-probs under the weights that the batch started from. Omitted,
    they are the new ones (one optimizer step a batch needs no second forward pass): then r = 1
    and the gradient is that of the policy gradient, weighted by w.
    """
    live = weights > 0
    # Select before arithmetic: 0 times infinity is NaN, also in the backward pass.
    new = torch.where(live, new_logprobs, 0.0)
    old = new.detach() if old_logprobs is None else torch.where(live, old_logprobs, 0.0)
    engine = torch.where(live, engine_logprobs, 0.0)
    is_weights = torch.exp(old - engine).clamp(max=limits.is_cap).detach()
    ratios = torch.exp(new - old)
    clipped = ratios.clamp(1.0 - limits.clip_low, 1.0 + limits.clip_high)
    objective = torch.minimum(ratios * advantages, clipped * advantages)
    loss = -(weights * is_weights * objective).sum()
    return LossTerms(loss=loss, is_weights=is_weights, ratios=ratios.detach())
