"""Tiny random models in Hugging Face form, written without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = 199
KINDS = ("llama-tied", "llama-untied", "qwen3-tied", "qwen3-untied")


def tiny_config(kind: str) -> dict[str, Any]:
    """config.json of a 2-layer model; grouped heads, head_dim not hidden / heads for Qwen3."""
    family, tying = kind.split("-")
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]],
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8 if family == "llama" else 16,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0 if family == "llama" else 1e6,
        "tie_word_embeddings": tying == "tied",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "dtype": "float32",
    }
    return config


def write_tiny_model(folder: Path, kind: str = "qwen3-tied", seed: int = 0) -> Path:
    """A model folder with random weights and a stand-in tokenizer file."""
    config = tiny_config(kind)
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    head = config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * 0.15

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.2 * torch.randn(size, generator=random)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, hidden), "model.norm.weight": norm(hidden)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(VOCAB, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors |= {
            f"{at}self_attn.q_proj.weight": matrix(heads * head, hidden),
            f"{at}self_attn.k_proj.weight": matrix(kv_heads * head, hidden),
            f"{at}self_attn.v_proj.weight": matrix(kv_heads * head, hidden),
            f"{at}self_attn.o_proj.weight": matrix(hidden, heads * head),
            f"{at}mlp.gate_proj.weight": matrix(ffn, hidden),
            f"{at}mlp.up_proj.weight": matrix(ffn, hidden),
            f"{at}mlp.down_proj.weight": matrix(hidden, ffn),
            f"{at}input_layernorm.weight": norm(hidden),
            f"{at}post_attention_layernorm.weight": norm(hidden),
        }
        if config["model_type"] == "qwen3":
            tensors |= {f"{at}self_attn.{x}_norm.weight": norm(head) for x in "qk"}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"stands": "in"}')
    return folder
