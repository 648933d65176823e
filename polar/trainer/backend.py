"""MegatronBackend: one optimizer step a batch on a Megatron-Core model.

Invariant: the step is a function of (weights, optimizer state, the set of occurrences). Passes
are summed, never averaged, so packing and order of rows do not matter; memory is bounded by
the tokens of one pass, and by a chunk of logits at a time.

Megatron's DDP and optimizer run on a CPU through `no_cuda`. The distributed optimizer stays
off: without Transformer Engine its state does not survive a resume exactly.
"""

import logging
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polar.errors import TrainerError
from polar.settings import TrainerSettings
from polar.trainer import hf_weights, megatron_model
from polar.trainer.grpo_loss import LossLimits, grpo_loss
from polar.trainer.model_shape import ModelShape
from polar.trainer.no_cuda import no_cuda
from polar.trainer.pass_tensors import PassTensors, pass_tensors
from polar.trainer.prefix_sharing import plan_passes
from polar.trainer.rows import read_rows
from polar.trainer.step_stats import StepStats
from polar.weight_folder import weights_digest
from schemas.batches import PackedRow
from schemas.columns import FloatColumn, TokenColumn
from schemas.policies import Canary, PolicyVersion

logger = logging.getLogger(__name__)

_LOGIT_CHUNK = 256
"""Trained positions whose logits exist at once: 256 x 49,152 float32 are 50 MB."""
_CANARY_TOKENS = 16
_CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}


class StepCancelledError(Exception):
    """The step was given up before it changed any weight."""


class MegatronBackend:
    """A model with its optimizer. Not thread-safe: all calls come from one thread."""

    def __init__(self, model_folder: Path, settings: TrainerSettings, weights: Path | None = None) -> None:
        """Build the model of `model_folder` with the weights of `weights` (default: the same folder)."""
        self.shape = ModelShape.from_folder(model_folder)
        self.cancelled = threading.Event()
        """Set from any thread: the running step raises StepCancelledError at its next pass."""
        self.optimizer_steps = 0
        """Steps that moved the weights; the learning rate's warm-up counts these."""
        self._folder = model_folder
        self._settings = settings
        self._limits = LossLimits(settings.clip_low, settings.clip_high, settings.is_cap)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]
        megatron_model.init_process_group()
        with no_cuda():
            self._gpt = megatron_model.build_model(self.shape, dtype)
            hf_weights.load_into(self._gpt, weights or model_folder, self.shape)
            self._gpt.to(self._device)
            wrapped: Any = self._gpt
            if dtype == torch.bfloat16:
                wrapped = megatron_model.Float16Module(self._gpt.config, self._gpt)
            self._model = megatron_model.DistributedDataParallel(
                self._gpt.config,
                megatron_model.DistributedDataParallelConfig(grad_reduce_in_fp32=True),
                wrapped,
            )
            self._optimizer = megatron_model.get_megatron_optimizer(
                megatron_model.OptimizerConfig(
                    optimizer="adam",
                    lr=settings.learning_rate,
                    adam_beta1=0.9,
                    adam_beta2=0.999,
                    weight_decay=0.0,
                    clip_grad=settings.grad_clip,
                    bf16=dtype == torch.bfloat16,
                    params_dtype=dtype,
                ),
                [self._model],
            )
        for group in self._optimizer.param_groups:
            group["foreach"], group["fused"] = False, True

    def train_batch(self, rows: Sequence[PackedRow], version: PolicyVersion | None) -> dict[str, float]:
        """One optimizer step over the rows of a batch; `version` names the weights before it.

        Returns the metrics of the step. Raises TrainerError for a bad row or a gradient that is
        not finite (the weights must then not be used further), StepCancelledError when cancelled.
        """
        began = time.monotonic()
        stats = StepStats(self._limits)
        learning_rate = self._learning_rate()
        with no_cuda():
            self._optimizer.zero_grad()
            self._model.zero_grad_buffer()
            passes = self._passes(rows, version)
            for one in passes:
                if self.cancelled.is_set():
                    raise StepCancelledError
                self._accumulate(one, stats)
            megatron_model.finalize_model_grads([self._model])
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            _, gradient_norm, _ = self._optimizer.step()
        if not math.isfinite(gradient_norm):
            raise TrainerError(f"batch {rows[0].batch_number}: the gradient is not finite")
        self.optimizer_steps += 1
        return {
            **stats.metrics(),
            "grad_norm": float(gradient_norm),
            "learning_rate": learning_rate,
            "row_tokens": float(sum(len(row.tokens) for row in rows)),
            "computed_tokens": float(sum(one.tokens.numel() for one in passes)),
            "passes": float(len(passes)),
            "step_seconds": time.monotonic() - began,
        }

    def logprobs(self, row: PackedRow) -> Tensor:
        """Log-probs [n] of the row's occurrences under the present weights, at their temperatures."""
        found = torch.empty(len(row.sources))
        with no_cuda(), torch.no_grad():
            for one in self._passes([row], None):
                found[one.occurrences] = self._logprobs(one).cpu()
        return found

    def canary(self) -> Canary:
        """A fixed text over the vocabulary with its log-probs under the present weights.

        Ids are spread over the vocabulary without a pattern: unlikely tokens answer to a change
        of any weight, where a fluent text would sit at probabilities near 1.
        """
        ids = [(7919 * (i + 1) + 104729 * i * i) % self.shape.vocab_size for i in range(2 * _CANARY_TOKENS)]
        prompt, completion = ids[:_CANARY_TOKENS], ids[_CANARY_TOKENS:]
        row = PackedRow(
            policy=self._settings.policy,
            batch_number=-1,
            index=0,
            tokens=TokenColumn(ids),
            positions=TokenColumn(range(len(ids))),
            segment_starts=TokenColumn([0, len(ids)]),
            range_counts=TokenColumn([0]),
            range_starts=TokenColumn(),
            range_ends=TokenColumn(),
            sources=TokenColumn(range(_CANARY_TOKENS - 1, len(ids) - 1)),
            targets=TokenColumn(completion),
            engine_logprobs=FloatColumn([0.0] * len(completion)),
            temperatures=FloatColumn([1.0] * len(completion)),
            weights=FloatColumn([0.0] * len(completion)),
            advantages=FloatColumn([0.0] * len(completion)),
            call_ordinals=TokenColumn([0] * len(completion)),
            call_indexes=TokenColumn(range(len(completion))),
            call_ids=("canary",),
            first_versions=(PolicyVersion(lineage="canary", step=0),),
            last_versions=(PolicyVersion(lineage="canary", step=0),),
        )
        return Canary(
            prompt_ids=TokenColumn(prompt),
            completion_ids=TokenColumn(completion),
            logprobs=FloatColumn(self.logprobs(row).tolist()),
            tolerance=_CANARY_TOLERANCE[self._settings.dtype],
        )

    def export(self, target: Path) -> str:
        """Write TARGET as a Hugging Face folder at the trainer's dtype; the digest of its weights."""
        hf_weights.export_folder(
            self._gpt.state_dict(), self.shape, self._folder, target, dtype=self._settings.dtype
        )
        return weights_digest(target)

    def optimizer_state(self) -> dict[str, Any]:
        """State that, with the exported weights, makes the next steps equal."""
        return {"optimizer": self._optimizer.state_dict(), "optimizer_steps": self.optimizer_steps}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Inverse of `optimizer_state`."""
        with no_cuda():
            self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group["foreach"], group["fused"] = False, True
        self.optimizer_steps = state["optimizer_steps"]

    def _learning_rate(self) -> float:
        warm_up = self._settings.warmup_steps
        reached = min(1.0, (self.optimizer_steps + 1) / warm_up) if warm_up else 1.0
        return self._settings.learning_rate * reached

    def _passes(self, rows: Sequence[PackedRow], version: PolicyVersion | None) -> list[PassTensors]:
        branches, occurrences = read_rows(rows, vocab_size=self.shape.vocab_size, version=version)
        plans = plan_passes(branches, self._settings.pass_tokens)
        return [pass_tensors(plan, occurrences, self._device) for plan in plans]

    def _hidden(self, one: PassTensors) -> Tensor:
        """[n, hidden] after the final norm, at the sources."""
        hidden: Tensor = self._model(
            one.tokens[None], one.positions[None], None, packed_seq_params=one.layout
        )
        return hidden.squeeze(1).index_select(0, one.sources)

    def _logprobs(self, one: PassTensors) -> Tensor:
        """[n]."""
        columns = (self._hidden(one), one.targets, one.temperatures)
        chunks = zip(*(torch.split(column, _LOGIT_CHUNK) for column in columns), strict=True)
        return torch.cat([self._gpt.token_logprobs(*chunk) for chunk in chunks])

    def _accumulate(self, one: PassTensors, stats: StepStats) -> None:
        """Forward and backward of one pass. Two backward passes: first each chunk of logits into
        the gradient of the hidden states, then those through the model, so that only one chunk
        of logits is alive at a time."""
        hidden = self._hidden(one)
        leaf = hidden.detach().requires_grad_()
        columns = (
            leaf, one.targets, one.temperatures, one.engine_logprobs,
            one.weights, one.advantages, one.is_current,
        )  # fmt: skip
        chunks = zip(*(torch.split(column, _LOGIT_CHUNK) for column in columns), strict=True)
        for states, targets, temperatures, engine, weights, advantages, is_current in chunks:
            new = self._gpt.token_logprobs(states, targets, temperatures)
            terms = grpo_loss(new, engine, weights, advantages, self._limits)
            stats.add(terms, new.detach(), engine, weights, is_current)
            torch.autograd.backward(terms.loss)
        torch.autograd.backward(hidden, leaf.grad)
