"""One optimizer step: its gradient against autograd on transformers, and what it must not depend on."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polar.errors import TrainerError
from polar.settings import TrainerSettings
from polar.trainer.backend import MegatronBackend, StepCancelledError
from polar.trainer.hf_weights import to_megatron
from polar.trainer.step import train_step
from schemas.batches import Builder, PackedRow
from schemas.columns import FloatColumn, TokenColumn
from schemas.policies import PolicyVersion
from tests.unit.core.occurrences import prefixes_in
from tests.unit.trainer.hand_batches import BASE, batch, row

pytestmark = pytest.mark.torch

OTHER = PolicyVersion(lineage="run-b", step=4)
UNCLIPPED = {"grad_clip": 1e9}
BUILDERS: list[Builder] = ["per_request", "prefix_merging", "prefix_tree"]


def gradients(folder: Path, settings: TrainerSettings, rows: Sequence[PackedRow]):
    """(gradient by Megatron parameter name, metrics) of one step."""
    backend = MegatronBackend(folder, settings)
    metrics = backend.train_batch(rows, BASE)
    return {n: p.main_grad.clone() for n, p in backend._gpt.named_parameters()}, metrics


def assert_equal_gradients(left, right) -> None:
    assert left.keys() == right.keys()
    scale = max(float(g.abs().max()) for g in left.values())
    assert scale > 1e-3
    for name in left:
        assert float((left[name] - right[name]).abs().max()) < 1e-5 * scale, name


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_gradient_equals_autograd_on_transformers(
    builder: Builder, settings: TrainerSettings, tiny_folder: Path
) -> None:
    """The reference runs each prefix on its own and knows neither rows nor segments."""
    from transformers import AutoModelForCausalLM

    settings = settings.model_copy(update=UNCLIPPED)
    _, rows = batch(0, 1, 2, builder=builder)
    found, metrics = gradients(tiny_folder, settings, rows)

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    loss = torch.zeros(())
    for packed in rows:
        prefixes = prefixes_in(packed)
        for i, source in enumerate(packed.sources):
            logits = model(torch.tensor([prefixes[source]])).logits[0, -1]
            new = torch.log_softmax(logits / packed.temperatures[i], -1)[packed.targets[i]]
            truncated = min(math.exp(float(new.detach()) - packed.engine_logprobs[i]), 2.0)
            ratio = torch.exp(new - new.detach())
            loss = loss - packed.weights[i] * truncated * ratio * packed.advantages[i]
    loss.backward()
    names = load_file(tiny_folder / "model.safetensors").keys()
    expected = to_megatron({n: model.get_parameter(n).grad for n in names}, _shape(tiny_folder))
    assert_equal_gradients(found, expected)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    norm = math.sqrt(sum(float((g**2).sum()) for g in expected.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def _shape(folder: Path):
    from polar.trainer.model_shape import ModelShape

    return ModelShape.from_folder(folder)


def test_builder_order_and_row_size_change_nothing(settings: TrainerSettings, tiny_folder: Path) -> None:
    settings = settings.model_copy(update=UNCLIPPED)
    _, merged = batch(0, 3, 4, 5, builder="prefix_merging", row_tokens=4096)
    _, single = batch(0, 3, 4, 5, builder="per_request", row_tokens=48)
    _, tree = batch(0, 3, 4, 5, builder="prefix_tree", row_tokens=4096)
    _, cut = batch(0, 3, 4, 5, builder="prefix_tree", row_tokens=48)
    assert len(merged) == len(tree) == 1
    assert len(single) > 5
    assert len(cut) > 3
    assert any(each.range_starts for each in cut)
    whole, metrics = gradients(tiny_folder, settings, merged)
    for rows in (single, single[::-1], tree, cut, cut[::-1]):
        found, other = gradients(tiny_folder, settings, rows)
        assert_equal_gradients(whole, found)
        for name in ("loss", "grad_norm", "max_logprob_gap", "mean_logprob_gap", "is_weight_mean"):
            assert other[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-7), name
        for name in ("trained_tokens", "gap_tokens", "is_capped_share"):
            assert other[name] == metrics[name], name


def test_a_tree_row_is_computed_as_it_is(settings: TrainerSettings, tiny_folder: Path) -> None:
    """What lies in the row once is computed once; the last token of a branch predicts nothing."""
    manifest, (only,) = batch(0, 3, 4, builder="prefix_tree", row_tokens=4096)
    metrics = MegatronBackend(tiny_folder, settings).train_batch([only], BASE)
    leaves = len(only.segment_starts) - 1
    assert metrics["computed_tokens"] == len(only.tokens) - leaves
    assert metrics["trained_tokens"] == manifest.trained_tokens


@pytest.mark.parametrize("pass_tokens", [1, 40, 90])
def test_small_passes_change_nothing(pass_tokens: int, settings: TrainerSettings, tiny_folder: Path) -> None:
    settings = settings.model_copy(update=UNCLIPPED)
    _, rows = batch(0, 3, 4, row_tokens=4096)
    whole, metrics = gradients(tiny_folder, settings, rows)
    small = settings.model_copy(update={"pass_tokens": pass_tokens})
    found, other = gradients(tiny_folder, small, rows)
    assert metrics["passes"] == 1
    assert other["passes"] > 1
    assert metrics["computed_tokens"] < other["computed_tokens"]
    assert_equal_gradients(whole, found)
    assert other["loss"] == pytest.approx(metrics["loss"], rel=1e-4, abs=1e-6)


def test_chunks_of_logits_change_nothing(
    settings: TrainerSettings, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings.model_copy(update=UNCLIPPED)
    _, rows = batch(0, 6, row_tokens=4096)
    whole, _ = gradients(tiny_folder, settings, rows)
    monkeypatch.setattr("polar.trainer.backend._LOGIT_CHUNK", 3)
    assert_equal_gradients(whole, gradients(tiny_folder, settings, rows)[0])


def test_the_gap_covers_calls_of_the_present_version_and_no_others(
    settings: TrainerSettings, tiny_folder: Path
) -> None:
    backend = MegatronBackend(tiny_folder, settings)
    sequence = [[5, 9, 11, 80, 7]]
    true = backend.logprobs(row(sequence, [(0, 3), (0, 4)])).tolist()
    exact = row(sequence, [(0, 3), (0, 4)], engine_logprobs=[true[0], true[1] + 0.25])
    far = row(sequence, [(0, 2)], engine_logprobs=[-0.01], version=OTHER)
    mixed = exact.model_copy(update={"last_versions": (OTHER,), "engine_logprobs": FloatColumn([-0.01] * 2)})
    metrics = backend.train_batch([exact, far, mixed], BASE)
    assert metrics["trained_tokens"] == 5
    assert metrics["gap_tokens"] == 2
    assert metrics["max_logprob_gap"] == pytest.approx(0.25, abs=1e-5)


def test_learning_rate_warms_up_over_the_first_steps(settings: TrainerSettings, tiny_folder: Path) -> None:
    backend = MegatronBackend(tiny_folder, settings)
    _, rows = batch(0, 7)
    rates = [backend.train_batch(rows, BASE)["learning_rate"] for _ in range(3)]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3])


def test_training_raises_what_was_good_and_lowers_what_was_bad(
    settings: TrainerSettings, tiny_folder: Path
) -> None:
    backend = MegatronBackend(tiny_folder, settings)
    _, rows = batch(0, 8)
    before = [backend.logprobs(r) for r in rows]
    for _ in range(6):
        backend.train_batch(rows, BASE)
    gain = 0.0
    for r, old in zip(rows, before, strict=True):
        advantages = torch.tensor(r.advantages.tolist())
        gain += float(((backend.logprobs(r) - old) * advantages).sum())
    assert gain > 1.0


def test_gradient_is_clipped_to_the_norm(settings: TrainerSettings, tiny_folder: Path) -> None:
    _, rows = batch(0, 1, 2)
    large = [r.model_copy(update={"weights": FloatColumn([w * 1e4 for w in r.weights])}) for r in rows]
    clipped, metrics = gradients(tiny_folder, settings, large)
    assert metrics["grad_norm"] > 100
    norm = math.sqrt(sum(float((g**2).sum()) for g in clipped.values()))
    assert norm == pytest.approx(settings.grad_clip, rel=1e-3)


def test_a_batch_without_live_groups_touches_nothing(
    settings: TrainerSettings, tiny_folder: Path, tmp_path: Path
) -> None:
    backend = MegatronBackend(tiny_folder, settings)
    backend.train_batch(batch(0, 1)[1], BASE)  # Adam has momentum now
    before = backend.export(tmp_path / "before")
    manifest, rows = batch(1)
    metrics = train_step(backend, manifest, rows, version=BASE, staleness_of=lambda _: 0)
    assert (metrics["no_op"], metrics["loss"], metrics["trained_tokens"]) == (1.0, 0.0, 0.0)
    masked = row([[5, 6, 7]], [(0, 2)], weights=[0.0])
    dead = manifest.model_copy(update={"trained_tokens": 1})
    assert train_step(backend, dead, [masked], version=BASE, staleness_of=lambda _: 0)["no_op"] == 1.0
    assert backend.export(tmp_path / "after") == before
    assert backend.optimizer_steps == 1


def test_staleness_is_counted_over_trained_tokens(settings: TrainerSettings, tiny_folder: Path) -> None:
    manifest, _ = batch(0, 1)
    rows = [row([[5, 6, 7, 8]], [(0, 1), (0, 2), (0, 3)]), row([[5, 6]], [(0, 1)], version=OTHER)]
    manifest = manifest.model_copy(update={"trained_tokens": 4})
    ages = {BASE: 1, OTHER: 5}
    backend = MegatronBackend(tiny_folder, settings)
    metrics = train_step(backend, manifest, rows, version=BASE, staleness_of=ages.__getitem__)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (2.0, 5.0)
    assert metrics["reward_mean"] == 0.5


def test_a_manifest_that_counts_other_tokens_is_refused(settings: TrainerSettings, tiny_folder: Path) -> None:
    manifest, rows = batch(0, 1)
    wrong = manifest.model_copy(update={"trained_tokens": manifest.trained_tokens + 1})
    with pytest.raises(TrainerError, match="batch 0: its rows train"):
        train_step(
            MegatronBackend(tiny_folder, settings), wrong, rows, version=BASE, staleness_of=lambda _: 0
        )


def test_a_cancelled_step_changes_nothing(
    settings: TrainerSettings, tiny_folder: Path, tmp_path: Path
) -> None:
    backend = MegatronBackend(tiny_folder, settings)
    before = backend.export(tmp_path / "before")
    backend.cancelled.set()
    with pytest.raises(StepCancelledError):
        backend.train_batch(batch(0, 1)[1], BASE)
    assert backend.export(tmp_path / "after") == before


def _branched(counts: list[int], ranges: list[tuple[int, int]], positions: list[int]) -> dict[str, object]:
    """Three tokens in segments of which the last one has these ancestors."""
    starts = [0, 1, 3] if len(counts) == 2 else [0, 1, 2, 3]
    return {
        "segment_starts": TokenColumn(starts),
        "range_counts": TokenColumn(counts),
        "range_starts": TokenColumn(start for start, _ in ranges),
        "range_ends": TokenColumn(end for _, end in ranges),
        "positions": TokenColumn(positions),
    }


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"targets": TokenColumn([7, 199])}, "vocabulary"),
        ({"tokens": TokenColumn([5, 6, -1])}, "vocabulary"),
        ({"sources": TokenColumn([0, 3])}, "source"),
        ({"sources": TokenColumn([-1, 1])}, "source"),
        ({"segment_starts": TokenColumn([0, 2])}, "segment_starts"),
        ({"segment_starts": TokenColumn([0, 2, 2, 3])}, "segment_starts"),
        ({"positions": TokenColumn([0, 1, 3])}, "positions"),
        ({"range_counts": TokenColumn([1])}, "range_counts"),
        (_branched([0, 1], [(0, 0)], [0, 1, 1]), "ancestor range is empty"),
        (_branched([0, 1], [(0, 2)], [0, 1, 2]), "does not lie before its segment"),
        (_branched([0, 1], [(0, 1)], [0, 0, 1]), "positions"),
        (_branched([0, 0, 2], [(0, 1), (1, 2)], [0, 0, 2]), "not one branch"),
        ({"call_ordinals": TokenColumn([0, 1])}, "call ordinal"),
        ({"engine_logprobs": FloatColumn([-1.0, math.nan])}, "finite log-prob"),
        ({"advantages": FloatColumn([1.0, math.inf])}, "advantage"),
        ({"weights": FloatColumn([0.5, -0.5])}, "weight"),
        ({"temperatures": FloatColumn([1.0, 0.0])}, "temperature"),
    ],
)
def test_an_inconsistent_row_is_refused_by_name(
    change: dict[str, object], word: str, settings: TrainerSettings, tiny_folder: Path
) -> None:
    bad = row([[5, 6, 7]], [(0, 1), (0, 2)]).model_copy(update=change)
    with pytest.raises(TrainerError, match=f"batch 0 row 0.*{word}"):
        MegatronBackend(tiny_folder, settings).train_batch([bad], BASE)
