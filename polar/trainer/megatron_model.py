"""A Megatron-Core GPTModel for passes of many sequences, without patching Megatron (0.16.1).

Invariant: a token sees the earlier tokens of its own sequence and nothing else, and its rotary
angle follows its position in that sequence. The model returns hidden states; the output layer
is applied afterwards, only where a token is trained.
"""

import logging
import os
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from polar.trainer.model_shape import ModelShape

with warnings.catch_warnings():
    # Megatron names the CUDA libraries that it does not find; none of them is needed.
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module, MegatronModule

logging.getLogger("megatron").setLevel(logging.WARNING)  # it describes each of its objects at INFO

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Float16Module",
    "OptimizerConfig",
    "PackedGPT",
    "build_model",
    "finalize_model_grads",
    "get_megatron_optimizer",
    "init_process_group",
    "segment_layout",
]


def init_process_group() -> None:
    """Process groups of a one-process trainer: gloo on a CPU, nccl on a GPU. Idempotent."""
    if not dist.is_initialized():
        if sys.platform == "linux":
            # gloo listens even alone; it must not be on an outside interface.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1)


@dataclass
class SegmentLayout(PackedSeqParams):  # type: ignore[misc]  # Megatron has no types
    """How the segments of a pass attend; handed to the model as packed_seq_params.

    For Megatron itself the pass is one sequence of the thd format, so that it applies the
    rotary angles as they are given, token by token.
    """

    segment_lengths: list[int] = field(default_factory=list)
    path_lengths: list[int] = field(default_factory=list)
    paths: Tensor | None = None
    """[sum of path_lengths] int64; none where each segment is a whole sequence."""
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Causal masks by (queries, keys), shared by the layers."""


def segment_layout(segment_lengths: list[int], path_lengths: list[int], paths: Tensor) -> SegmentLayout:
    """Layout of a pass (polar.trainer.prefix_sharing)."""
    size = sum(segment_lengths)
    whole = torch.tensor([0, size], dtype=torch.int32, device=paths.device)
    return SegmentLayout(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=size,
        max_seqlen_kv=size,
        segment_lengths=segment_lengths,
        path_lengths=path_lengths,
        paths=None if segment_lengths == path_lengths else paths,
    )


class SegmentAttention(MegatronModule):  # type: ignore[misc]
    """Attention of each segment to its path; core_attention of the layer spec."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,  # noqa: ARG002 - Megatron passes these by name
        attn_mask_type: Any,  # noqa: ARG002
        attention_type: str,  # noqa: ARG002
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002
        packed_seq_params: SegmentLayout,
        **_: Any,
    ) -> Tensor:
        """query [t, heads, d], key and value [t, kv heads, d] → [t, heads, d]."""
        layout = packed_seq_params
        if layout.paths is not None:
            key, value = key.index_select(0, layout.paths), value.index_select(0, layout.paths)
        # split, not slices: the backward of a slice would fill the whole pass once a segment
        segments = zip(
            torch.split(query, layout.segment_lengths),
            torch.split(key, layout.path_lengths),
            torch.split(value, layout.path_lengths),
            strict=True,
        )
        return torch.cat([self._attend(q, k, v, layout) for q, k, v in segments])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout) -> Tensor:
        queries, keys = query.size(0), key.size(0)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        out = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if queries == keys else _lower_right(queries, keys, layout),
            is_causal=queries == keys,
            scale=self.scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.squeeze(0).transpose(0, 1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """No parameters."""
        return {}


def _lower_right(queries: int, keys: int, layout: SegmentLayout) -> Tensor:
    """[queries, keys] bool: the last query sees every key, each one before it one less."""
    mask = layout.masks.get((queries, keys))
    if mask is None:
        whole = torch.ones(queries, keys, dtype=torch.bool, device=layout.cu_seqlens_q.device)
        mask = layout.masks[queries, keys] = whole.tril(keys - queries)
    return mask


class PackedGPT(GPTModel):  # type: ignore[misc]
    """GPTModel whose forward gives the hidden states [t, 1, hidden] of one pass."""

    def __init__(self, config: TransformerConfig, shape: ModelShape) -> None:
        spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = SegmentAttention
        super().__init__(
            config,
            spec,
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_positions,
            position_embedding_type="none",
            share_embeddings_and_output_weights=shape.tied,
            parallel_output=True,
        )
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self.inverse_frequencies = 1.0 / (shape.rope_theta**exponents)

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Any, ...]:
        out = list(super()._preprocess(input_ids=input_ids, position_ids=position_ids, **kwargs))
        frequencies = self.inverse_frequencies.to(position_ids.device)
        angles = position_ids.t().to(torch.float32)[..., None] * frequencies  # [t, 1, d / 2]
        out[1] = torch.cat((angles, angles), -1).unsqueeze(2)
        return tuple(out)

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    def token_logprobs(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        """Log-probs [n] of `targets` [n] after `hidden` [n, hidden], logits over temperature."""
        is_shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if is_shared else None
        dtype = self.embedding.word_embeddings.weight.dtype
        logits, _ = self.output_layer(hidden.to(dtype).unsqueeze(1), weight=weight)
        scaled = logits.float() / temperatures[:, None, None]
        loss: Tensor = tensor_parallel.vocab_parallel_cross_entropy(scaled, targets.unsqueeze(1))
        return -loss.squeeze(1)


def build_model(shape: ModelShape, dtype: torch.dtype) -> PackedGPT:
    """An uninitialised model of this shape; weights are loaded afterwards, all of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PackedGPT(_transformer_config(shape, dtype), shape)


def _transformer_config(shape: ModelShape, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        ffn_hidden_size=shape.ffn_size,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Sums, not means: all denominators are in the rows. Must be set before DDP is built.
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
