"""What an engine checks before it loads a folder's weights: digest, names and shapes.

Read from the files alone; nothing here needs torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from polar.weight_folder import weight_files, weights_digest

TRANSFER_BACKEND = "file"
"""vLLM's name for the weight-transfer backend that reads such folders (polar.engines.vllm_extension)."""
_OUTPUT_LAYER = "lm_head.weight"

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name → shape."""


def verified_weight_files(folder: Path, sha256: str) -> list[Path]:
    """The files, after their digest was compared. Raises ValueError when it differs."""
    files = weight_files(folder)
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors files")
    found = weights_digest(folder)
    if found != sha256:
        raise ValueError(f"weights in {folder} have digest {found}, published was {sha256}")
    return files


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors, from the files' headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        shapes |= {name: tuple(item["shape"]) for name, item in header.items() if name != "__metadata__"}
    return shapes


def check_same_layout(base: Shapes, new: Shapes) -> None:
    """Raises ValueError unless both have the same tensors.

    An output layer that is tied to the embedding may be written out or left out.
    """
    names = {name for name in base.keys() ^ new.keys() if name != _OUTPUT_LAYER}
    shapes = {name for name in base.keys() & new.keys() if base[name] != new[name]}
    if names or shapes:
        sample = ", ".join(sorted(names | shapes)[:3])
        raise ValueError(
            f"these weights are of another model than the engine's: {len(names)} tensors only on one side, "
            f"{len(shapes)} of another shape ({sample})"
        )
