"""A folder of published weights: its files and their digest.

Invariant: trainer, weight-sync and engines compute the same digest. Nothing here needs torch.
"""

import hashlib
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder in name order."""
    return sorted(folder.glob("*.safetensors"))


def weights_digest(folder: Path) -> str:
    """`schemas.base.digest` of the files' bytes, in name order, without holding them in memory."""
    state = hashlib.sha256()
    for file in weight_files(folder):
        state.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                state.update(chunk)
    return state.hexdigest()
