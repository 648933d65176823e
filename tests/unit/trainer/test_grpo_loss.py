"""The loss against an independent reference in plain Python, and its laws."""

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polar.settings import TrainerSettings
from polar.trainer.backend import MegatronBackend
from polar.trainer.grpo_loss import LossLimits, grpo_loss
from polar.trainer.megatron_model import PackedGPT
from tests.unit.core.given_cases import Case, cases, number

pytestmark = pytest.mark.torch

LIMITS = LossLimits(clip_low=0.2, clip_high=0.28, is_cap=2.0)
UNBOUNDED = LossLimits(clip_low=1e9, clip_high=1e9, is_cap=math.inf)


def reference(new, old, engine, weights, advantages, limits):
    total = 0.0
    for n, o, e, weight, advantage in zip(new, old, engine, weights, advantages, strict=True):
        r, w = math.exp(n - o), min(math.exp(o - e), limits.is_cap)
        bounded = max(1 - limits.clip_low, min(1 + limits.clip_high, r))
        total -= weight * w * min(r * advantage, bounded * advantage)
    return total


def columns(seed: int, size: int = 40) -> dict[str, list[float]]:
    rng = random.Random(seed)
    old = [-3 * rng.random() for _ in range(size)]
    return {
        "new": [o + rng.gauss(0, 0.3) for o in old],
        "old": old,
        "engine": [o + rng.gauss(0, 0.8) for o in old],
        "weights": [rng.random() / size for _ in range(size)],
        "advantages": [rng.gauss(0, 1) for _ in range(size)],
    }


def run(values: dict[str, list[float]], limits: LossLimits = LIMITS, *, with_old: bool = True):
    tensors = {name: torch.tensor(column) for name, column in values.items()}
    new = tensors["new"].requires_grad_()
    terms = grpo_loss(
        new,
        tensors["engine"],
        tensors["weights"],
        tensors["advantages"],
        limits,
        tensors["old"] if with_old else None,
    )
    terms.loss.backward()
    return terms, new.grad


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_reference_with_clipping_and_truncation(seed: int) -> None:
    values = columns(seed)
    terms, _ = run(values)
    expected = reference(*(values[k] for k in ("new", "old", "engine", "weights", "advantages")), LIMITS)
    assert float(terms.loss.detach()) == pytest.approx(expected, rel=1e-5)
    outside = [r for r in terms.ratios.tolist() if not 0.8 <= r <= 1.28]
    assert outside, "the case must reach the clip"
    assert max(terms.is_weights.tolist()) == 2.0, "the case must reach the cap"


@pytest.mark.parametrize("seed", range(3))
def test_gradient_is_zero_exactly_where_the_clip_binds(seed: int) -> None:
    values = columns(seed)
    terms, gradient = run(values)
    for i, (r, w) in enumerate(zip(terms.ratios.tolist(), terms.is_weights.tolist(), strict=True)):
        advantage, weight = values["advantages"][i], values["weights"][i]
        binds = (r > 1.28 and advantage > 0) or (r < 0.8 and advantage < 0)
        expected = 0.0 if binds else -weight * w * r * advantage
        assert float(gradient[i]) == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_the_policy_gradient() -> None:
    values = columns(9)
    terms, gradient = run(values, with_old=False)
    assert terms.ratios.tolist() == [1.0] * 40
    for i, (n, e) in enumerate(zip(values["new"], values["engine"], strict=True)):
        expected = -values["weights"][i] * min(math.exp(n - e), 2.0) * values["advantages"][i]
        assert float(gradient[i]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan])
def test_an_occurrence_of_weight_zero_contributes_exactly_nothing(bad: float) -> None:
    values = columns(3)
    clean, _ = run({name: column[1:] for name, column in values.items()})
    values["weights"][0] = 0.0
    values["old"][0] = values["engine"][0] = values["new"][0] = bad
    terms, gradient = run(values)
    assert torch.isfinite(gradient).all()
    assert float(gradient[0]) == 0.0
    assert float(terms.loss.detach()) == pytest.approx(float(clean.loss.detach()), rel=1e-6)


def test_the_loss_is_a_sum_over_any_split_in_any_order() -> None:
    values = columns(4)
    whole, _ = run(values)
    order = random.Random(1).sample(range(40), 40)
    parts = [
        run({n: [c[i] for i in order[a : a + 7]] for n, c in values.items()})[0] for a in range(0, 40, 7)
    ]
    assert sum(float(p.loss.detach()) for p in parts) == pytest.approx(float(whole.loss.detach()), rel=1e-5)


def test_an_engine_far_off_is_capped_not_infinite() -> None:
    values = columns(5)
    values["engine"] = [-9998.0] * 40
    terms, gradient = run(values)
    assert set(terms.is_weights.tolist()) == {2.0}
    assert torch.isfinite(gradient).all()


def logprob_of(logits: list[float], target: int, temperature: float, folder: Path) -> float:
    """The trainer's log-prob of `target` where its output layer gives `logits`."""
    backend = MegatronBackend(folder, TrainerSettings(num_threads=1))
    model = SimpleNamespace(
        share_embeddings_and_output_weights=False,
        embedding=backend._gpt.embedding,
        output_layer=lambda hidden, weight: (hidden, weight),
    )
    columns = torch.tensor([logits]), torch.tensor([target]), torch.tensor([temperature])
    return float(PackedGPT.token_logprobs(model, *columns))  # type: ignore[arg-type]


def test_logprobs_are_those_of_the_distribution_that_was_sampled(tiny_folder: Path) -> None:
    logits = [0.5, 2.0, -1.0]
    halves = [math.exp(value / 2) for value in logits]
    expected = math.log(halves[1] / sum(halves))
    assert logprob_of(logits, 1, 2.0, tiny_folder) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("case", cases("grpo", given="logits"))
def test_given_temperature(case: Case, tiny_folder: Path) -> None:
    given, expect = case["given"], case["expect"]
    temperature = given["sampling"]["temperature"]
    at_one = logprob_of(given["logits"], given["token"], 1.0, tiny_folder)
    at_its_own = logprob_of(given["logits"], given["token"], temperature, tiny_folder)
    assert at_one == pytest.approx(expect["raw_logprob"], abs=1e-6)
    assert at_its_own == pytest.approx(expect["processed_logprob"], abs=1e-6)
    # The engine's log-prob is the processed one: before any update the ratio must be 1.
    ratio = math.exp(at_its_own - expect["processed_logprob"])
    assert ratio == pytest.approx(expect["ratio_if_consistent"], abs=1e-6)
    assert math.exp(at_its_own - at_one) == pytest.approx(expect["ratio_if_mixed"], abs=1e-6)


def _with_loss(case: Any) -> bool:
    return not case.values[0] or "groups" in case.values[0]["given"]


@pytest.mark.parametrize("case", [case for case in cases("grpo") if _with_loss(case)])
def test_given_case(case: Case) -> None:
    expect = case["expect"]
    values: dict[str, list[float]] = {k: [] for k in ("new", "old", "engine", "weights", "advantages")}
    for group in case["given"]["groups"]:
        for rollout in group["rollouts"]:
            for row in rollout["rows"]:
                share = expect["row_share"].get(row["row"], 0.0)
                live = sum(row["mask"])
                for mask, old, new in zip(row["mask"], row["old_logprobs"], row["new_logprobs"], strict=True):
                    values["new"].append(number(new))
                    values["old"].append(number(old))
                    values["engine"].append(number(old))
                    values["weights"].append(share / live if mask else 0.0)
                    values["advantages"].append(expect["advantages"].get(rollout["rollout"], 0.0))
    terms, gradient = run(values, UNBOUNDED)
    assert float(terms.loss.detach()) == pytest.approx(expect["loss"], abs=1e-6)
    assert torch.isfinite(gradient).all()
