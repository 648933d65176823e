"""Digest of a folder's weights: trainer, weight-sync and engines must compute the same one."""

import hashlib
from pathlib import Path

TRANSFER_BACKEND = "file"
"""vLLM's name for the weight-transfer backend that reads such folders (polar.engines.vllm_extension)."""
_CHUNK = 1 << 20


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder in name order."""
    return sorted(folder.glob("*.safetensors"))


def weights_digest(folder: Path) -> str:
    """`schemas.base.digest` of the files' bytes, in name order, without holding them in memory."""
    state = hashlib.sha256()
    for file in weight_files(folder):
        state.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                state.update(chunk)
    return state.hexdigest()


def verified_weight_files(folder: Path, sha256: str) -> list[Path]:
    """The files, after their digest was compared. Raises ValueError when it differs."""
    files = weight_files(folder)
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors files")
    found = weights_digest(folder)
    if found != sha256:
        raise ValueError(f"weights in {folder} have digest {found}, published was {sha256}")
    return files
