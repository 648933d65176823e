"""The digest and the layout of a folder's weights."""

import json
from pathlib import Path

import pytest

from polar.engines.weight_files import (
    check_same_layout,
    tensor_shapes,
    verified_weight_files,
)
from polar.weight_folder import weights_digest
from schemas.base import digest


def write(file: Path, shapes: dict[str, tuple[int, ...]], payload: bytes = b"\0" * 64) -> None:
    header = json.dumps(
        {"__metadata__": {"format": "pt"}}
        | {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    ).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + payload)


def test_the_digest_is_that_of_the_published_policy(tmp_path: Path) -> None:
    (tmp_path / "b.safetensors").write_bytes(b"second" * 300_000)
    (tmp_path / "a.safetensors").write_bytes(b"first")
    (tmp_path / "config.json").write_bytes(b"not part of it")
    assert weights_digest(tmp_path) == digest(b"first", b"second" * 300_000)


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        verified_weight_files(tmp_path, "")
    (tmp_path / "a.safetensors").write_bytes(b"first")
    expected = digest(b"first")
    assert verified_weight_files(tmp_path, expected) == [tmp_path / "a.safetensors"]
    (tmp_path / "a.safetensors").write_bytes(b"firsT")
    with pytest.raises(ValueError, match=f"published was {expected}"):
        verified_weight_files(tmp_path, expected)


def test_names_and_shapes_come_from_the_headers(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"x": (2, 3)})
    write(tmp_path / "b.safetensors", {"y": (4,)})
    assert tensor_shapes(tmp_path) == {"x": (2, 3), "y": (4,)}


def test_another_model_is_refused() -> None:
    base = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}
    check_same_layout(base, base)
    check_same_layout(base, base | {"lm_head.weight": (8, 4)})
    with pytest.raises(
        ValueError, match=r"of another model than the engine's: 0 tensors .* 1 of another shape"
    ):
        check_same_layout(base, base | {"model.norm.weight": (5,)})
    with pytest.raises(ValueError, match=r"1 tensors only on one side.*model\.norm\.weight"):
        check_same_layout(base, {"model.embed_tokens.weight": (8, 4)})
