"""The Megatron model against transformers, packed against separate, weights out against weights in."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from polar.errors import TrainerError
from polar.settings import TrainerSettings
from polar.trainer.backend import MegatronBackend
from polar.trainer.model_shape import ModelShape
from polar.weight_folder import weights_digest
from schemas.base import digest
from tests.unit.trainer.hand_batches import row
from tests.unit.trainer.tiny_models import KINDS, VOCAB, tiny_config, write_tiny_model

pytestmark = pytest.mark.torch


def sequences(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def everywhere(parts: list[list[int]]) -> list[tuple[int, int]]:
    return [(s, i) for s, part in enumerate(parts) for i in range(1, len(part))]


def reference_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM  # heavy, and only the reference needs it

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / kind, kind)
    backend = MegatronBackend(folder, TrainerSettings(num_threads=1))
    parts = sequences(1, 17, 40, 5)
    found = backend.logprobs(row(parts, everywhere(parts), temperature=0.6)).split([16, 39, 4])
    model = reference_model(folder)
    for part, logprobs in zip(parts, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([part])).logits[0]
        expected = torch.log_softmax(logits / 0.6, -1)[:-1].gather(1, torch.tensor(part[1:])[:, None])[:, 0]
        assert (logprobs - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["llama-untied", "qwen3-tied"])
def test_a_packed_sequence_sees_nothing_of_its_neighbours(kind: str, tmp_path: Path) -> None:
    backend = MegatronBackend(write_tiny_model(tmp_path, kind), TrainerSettings(num_threads=1))
    parts = sequences(2, 11, 30, 1, 22)
    packed = backend.logprobs(row(parts, everywhere(parts)))
    alone = torch.cat([backend.logprobs(row([p], everywhere([p]))) for p in parts if len(p) > 1])
    assert (packed - alone).abs().max() < 1e-5
    changed = [[(t + 1) % VOCAB for t in parts[0]], parts[1], parts[2], parts[3]]
    other = backend.logprobs(row(changed, everywhere(changed)))
    assert torch.equal(packed[10:], other[10:])
    assert not torch.allclose(packed[:10], other[:10])


@pytest.mark.parametrize("kind", ["llama-untied", "qwen3-tied"])
def test_a_shared_prefix_changes_no_logprob(kind: str, tmp_path: Path) -> None:
    backend = MegatronBackend(write_tiny_model(tmp_path, kind), TrainerSettings(num_threads=1))
    prompt, *tails = sequences(3, 20, 9, 1, 14)
    middle = prompt[:8]
    parts = [prompt, prompt + tails[0], prompt + tails[1], middle + tails[2], prompt + tails[0] + tails[2]]
    together = backend.logprobs(row(parts, everywhere(parts)))
    alone = torch.cat([backend.logprobs(row([p], everywhere([p]))) for p in parts])
    assert (together - alone).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_export_gives_back_every_tensor_bit_for_bit(kind: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "base", kind)
    backend = MegatronBackend(folder, TrainerSettings(num_threads=1))
    target = tmp_path / "out" / "run-1-0"
    sha = backend.export(target)
    before, after = load_file(folder / "model.safetensors"), load_file(target / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sha == weights_digest(target) == digest((target / "model.safetensors").read_bytes())
    assert (target / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    assert [p.name for p in target.parent.iterdir()] == ["run-1-0"], "no draft is left"


def test_bfloat16_weights_are_trained_in_float32(tmp_path: Path) -> None:
    backend = MegatronBackend(write_tiny_model(tmp_path / "base"), TrainerSettings(num_threads=1))
    backend.export(tmp_path / "out")
    other = MegatronBackend(tmp_path / "out", TrainerSettings(num_threads=1, dtype="bfloat16"))
    other.export(tmp_path / "half")
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    again = MegatronBackend(tmp_path / "half", TrainerSettings(num_threads=1))
    again.export(tmp_path / "whole")
    half, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("half", "whole"))
    assert all(torch.equal(half[name].float(), whole[name]) for name in half)


def test_canary_is_what_the_exported_weights_say(tmp_path: Path) -> None:
    backend = MegatronBackend(write_tiny_model(tmp_path), TrainerSettings(num_threads=1))
    canary = backend.canary()
    ids = [*canary.prompt_ids, *canary.completion_ids]
    positions = [(0, i) for i in range(len(canary.prompt_ids), len(ids))]
    assert backend.logprobs(row([ids], positions)).tolist() == pytest.approx(list(canary.logprobs), abs=1e-6)
    assert canary.tolerance == 1e-3
    assert len(set(ids)) > 20


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(TrainerError, match=word):
        ModelShape.from_config(tiny_config("llama-tied") | change)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "a", "llama-tied")
    other = write_tiny_model(tmp_path / "b", "qwen3-tied")
    with pytest.raises(TrainerError, match="q_norm"):
        MegatronBackend(other, TrainerSettings(num_threads=1), weights=folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(TrainerError, match="safetensors"):
        MegatronBackend(folder, TrainerSettings(num_threads=1))
    with pytest.raises(TrainerError, match="POLAR_TRAINER_MODEL_PATH"):
        MegatronBackend(tmp_path / "nothing", TrainerSettings())
