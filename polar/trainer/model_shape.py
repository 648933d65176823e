"""What a Hugging Face config.json says about a model, or why the trainer cannot run it.

Invariant: a ModelShape exists only for a model that the trainer computes exactly; anything
else in a config (biases, rotary scaling, sliding windows) is refused by name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from polar.errors import TrainerError

_QK_NORM = {"llama": False, "qwen3": True}
"""Supported `model_type` → whether queries and keys are normalised per head."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder of the Llama family."""

    model_type: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool
    """Input embedding and output layer share one matrix."""

    @property
    def qk_norm(self) -> bool:
        """Queries and keys pass an RMSNorm per head."""
        return _QK_NORM[self.model_type]

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read FOLDER/config.json. Raises TrainerError when it is missing or not supported."""
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise TrainerError(
                f"{path}: {error}; POLAR_TRAINER_MODEL_PATH must name a Hugging Face model folder"
            ) from error
        return cls.from_config(config)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Shape of a parsed config.json. Raises TrainerError for what is not supported."""
        kind = config.get("model_type")
        if kind not in _QK_NORM:
            raise TrainerError(f"model_type {kind!r} is not supported; the trainer knows {sorted(_QK_NORM)}")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        refused = {
            "hidden_act": config.get("hidden_act", "silu") != "silu",
            "attention_bias": bool(config.get("attention_bias")),
            "mlp_bias": bool(config.get("mlp_bias")),
            "use_sliding_window": bool(config.get("use_sliding_window")),
            "rope scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
            "quantization_config": config.get("quantization_config") is not None,
        }
        if any(refused.values()):
            names = ", ".join(name for name, found in refused.items() if found)
            raise TrainerError(f"this {kind} model uses what the trainer does not compute: {names}")
        heads = int(config["num_attention_heads"])
        return cls(
            model_type=kind,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            ffn_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            max_positions=int(config["max_position_embeddings"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
