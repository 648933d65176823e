"""A pass and its occurrences as tensors on the device."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polar.trainer.megatron_model import SegmentLayout, segment_layout
from polar.trainer.prefix_sharing import Pass
from polar.trainer.rows import Occurrences


@dataclass(frozen=True, slots=True)
class PassTensors:
    """t tokens with n trained occurrences."""

    tokens: Tensor
    """[t] int64."""
    positions: Tensor
    """[t] int64."""
    layout: SegmentLayout
    sources: Tensor
    """[n] int64 offset whose hidden state predicts the target."""
    targets: Tensor
    """[n] int64."""
    engine_logprobs: Tensor
    """[n] float32."""
    temperatures: Tensor
    """[n] float32."""
    weights: Tensor
    """[n] float32."""
    advantages: Tensor
    """[n] float32."""
    is_current: Tensor
    """[n] bool."""
    occurrences: Tensor
    """[n] int64 index of each occurrence in the rows, on the CPU."""


def pass_tensors(plan: Pass, occurrences: Occurrences, device: torch.device) -> PassTensors:
    """Move a planned pass to the device."""

    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    at = plan.occurrences
    return PassTensors(
        tokens=tensor(plan.tokens),
        positions=tensor(plan.positions),
        layout=segment_layout(plan.segment_lengths, plan.path_lengths, tensor(plan.paths)),
        sources=tensor(plan.sources),
        targets=tensor(occurrences.targets[at]),
        engine_logprobs=tensor(occurrences.engine_logprobs[at]),
        temperatures=tensor(occurrences.temperatures[at]),
        weights=tensor(occurrences.weights[at]),
        advantages=tensor(occurrences.advantages[at]),
        is_current=tensor(occurrences.is_current[at]),
        occurrences=torch.from_numpy(at),
    )
