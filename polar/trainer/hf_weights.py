"""Hugging Face ↔ Megatron weights of Llama and Qwen3, and their folders on disk.

Invariant: load followed by export gives bit-equal tensors (at the trainer's dtype), and a
folder appears under its name whole or not at all.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from polar.errors import TrainerError
from polar.trainer.model_shape import ModelShape

WEIGHTS_FILE = "model.safetensors"
_COPIED_SUFFIXES = {".json", ".txt", ".jinja", ".model"}

_LAYER_NAMES = {
    "self_attn.o_proj": "self_attention.linear_proj",
    "mlp.down_proj": "mlp.linear_fc2",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
}
"""Tensors of a layer that are the same in both worlds: Hugging Face name → Megatron name."""
_QK_NORM_NAMES = {
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
}


def _layer_names(shape: ModelShape) -> dict[str, str]:
    return _LAYER_NAMES | (_QK_NORM_NAMES if shape.qk_norm else {})


def _top_names(shape: ModelShape) -> dict[str, str]:
    names = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
    }
    return names if shape.tied else names | {"lm_head.weight": "output_layer.weight"}


def to_megatron(tensors: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Hugging Face state dict → Megatron's. Raises TrainerError naming a missing tensor.

    Megatron keeps Q, K and V interleaved per KV group in one matrix, gate above up in another.
    """
    try:
        out = {mine: tensors[theirs] for theirs, mine in _top_names(shape).items()}
        for layer in range(shape.num_layers):
            theirs, mine = f"model.layers.{layer}.", f"decoder.layers.{layer}."
            for a, b in _layer_names(shape).items():
                out[f"{mine}{b}.weight"] = tensors[f"{theirs}{a}.weight"]
            qkv = [
                torch.unflatten(tensors[f"{theirs}self_attn.{x}_proj.weight"], 0, (shape.num_kv_heads, -1))
                for x in "qkv"
            ]
            out[f"{mine}self_attention.linear_qkv.weight"] = torch.cat(qkv, 1).flatten(0, 1)
            gate_up = [tensors[f"{theirs}mlp.{x}_proj.weight"] for x in ("gate", "up")]
            out[f"{mine}mlp.linear_fc1.weight"] = torch.cat(gate_up)
    except KeyError as error:
        raise TrainerError(f"the weights have no tensor {error.args[0]}") from error
    return out


def to_hugging_face(state: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Megatron's state dict → Hugging Face's; inverse of `to_megatron`. Tensors are contiguous."""
    per_group = shape.num_heads // shape.num_kv_heads * shape.head_dim
    out = {theirs: state[mine] for theirs, mine in _top_names(shape).items()}
    for layer in range(shape.num_layers):
        theirs, mine = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for a, b in _layer_names(shape).items():
            out[f"{theirs}{a}.weight"] = state[f"{mine}{b}.weight"]
        qkv = torch.unflatten(state[f"{mine}self_attention.linear_qkv.weight"], 0, (shape.num_kv_heads, -1))
        parts = torch.split(qkv, [per_group, shape.head_dim, shape.head_dim], 1)
        for x, part in zip("qkv", parts, strict=True):
            out[f"{theirs}self_attn.{x}_proj.weight"] = part.flatten(0, 1)
        gate, up = state[f"{mine}mlp.linear_fc1.weight"].chunk(2)
        out[f"{theirs}mlp.gate_proj.weight"], out[f"{theirs}mlp.up_proj.weight"] = gate, up
    # clone: safetensors refuses tensors that share storage, and gate|up are views of one matrix
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in out.items()
    }


def load_into(model: torch.nn.Module, folder: Path, shape: ModelShape) -> None:
    """Load a folder's *.safetensors into a Megatron model, cast to the model's dtype.

    Raises TrainerError when there are no weights, or they do not fit the model.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TrainerError(f"{folder} holds no *.safetensors; convert the model to Hugging Face form first")
    tensors: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    try:
        result = model.load_state_dict(to_megatron(tensors, shape), strict=False)
    except RuntimeError as error:
        raise TrainerError(f"the weights in {folder} do not fit the model: {error}") from error
    missing = [name for name in result.missing_keys if "_extra_state" not in name]
    if missing or result.unexpected_keys:
        raise TrainerError(
            f"the weights in {folder} do not fit the model: "
            f"missing {missing}, unexpected {result.unexpected_keys}"
        )


def export_folder(
    state: Mapping[str, Tensor], shape: ModelShape, base_folder: Path, target: Path, dtype: str
) -> None:
    """Write TARGET: weights of a Megatron state dict beside the base model's config and tokenizer.

    Written under a temporary name, fsynced, renamed: TARGET is complete once it exists.
    """
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for source in sorted(base_folder.iterdir()):
        if source.suffix in _COPIED_SUFFIXES and not source.name.endswith(".index.json"):
            shutil.copyfile(source, draft / source.name)
    config = json.loads((draft / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(to_hugging_face(state, shape), draft / WEIGHTS_FILE, metadata={"format": "pt"})
    publish_folder(draft, target)


def publish_folder(draft: Path, target: Path) -> None:
    """Make DRAFT durable and give it its name; an older TARGET is replaced."""
    for path in draft.iterdir():
        _fsync(path)
    _fsync(draft)
    if target.exists():
        shutil.rmtree(target)
    draft.rename(target)
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
