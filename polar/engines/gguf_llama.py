"""A Llama-type GGUF file → Hugging Face configuration and float32 tensors.

GGUF stores the rows of the query and key projections interleaved for its own rotary embedding;
they are put back into halves here, so that the result computes what the original model computed.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensor = NDArray[np.float32]

_FLAT = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def read_llama(path: Path, progress: Callable[[float], None]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments for transformers' LlamaConfig, and tensors by Hugging Face name.

    `progress` is told the finished share. Raises KeyError for a tensor or a field that a Llama
    model does not have.
    """
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = int(field("attention.head_count")), int(field("attention.head_count_kv"))
    tensors: dict[str, Tensor] = {}
    for done, stored in enumerate(reader.tensors, 1):
        name, values = str(stored.name), np.asarray(dequantize(stored.data, stored.tensor_type), np.float32)
        if name.endswith("attn_q.weight"):
            values = halves_from_pairs(values, heads)
        elif name.endswith("attn_k.weight"):
            values = halves_from_pairs(values, kv_heads)
        tensors[_hf_name(name)] = np.ascontiguousarray(values)
        progress(done / len(reader.tensors))
    config = {
        "vocab_size": int(field("vocab_size")),
        "hidden_size": int(field("embedding_length")),
        "intermediate_size": int(field("feed_forward_length")),
        "num_hidden_layers": int(field("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": int(field("context_length")),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(field("rope.freq_base"))},
        # Stored as a float32: 1e-5 comes back as 9.999999747e-06.
        "rms_norm_eps": float(f"{field('attention.layer_norm_rms_epsilon'):.6g}"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    return config, tensors


def halves_from_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """[heads·d, hidden] with rotary rows in pairs (0, d/2, 1, d/2+1, …) → in two halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    if name in _FLAT:
        return _FLAT[name]
    match = _BLOCK.fullmatch(name)
    if match is None:
        raise KeyError(f"{name} is no tensor of a Llama model")
    return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.weight"
