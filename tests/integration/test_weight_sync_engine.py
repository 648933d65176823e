"""weight-sync against a real vLLM server, checked against transformers in float32."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polar.errors import EngineError
from polar.weight_folder import weights_digest
from polar.weightsync.engine_client import EngineClient
from polar.weightsync.engine_sync import CanaryError, EngineSync
from polar.weightsync.gateways import Gateways
from schemas.engines import EngineState
from schemas.policies import Canary, PolicyPublished, PolicyVersion
from tests.engine_fixture import RunningEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = [int(token) for token in np.random.default_rng(0).integers(100, 40_000, size=300)]
"""Longer than two blocks of the prefix cache."""
TOLERANCE = 1e-3


@dataclass
class Synced:
    """The engine under test with a weight-sync of its own."""

    engine: RunningEngine
    client: EngineClient
    sync: EngineSync
    states: list[EngineState]
    http: httpx.AsyncClient


@pytest.fixture
async def synced(engine: RunningEngine) -> AsyncIterator[Synced]:
    """Afterwards the engine has its base weights again."""
    client = EngineClient("engine-0", engine.base_url, timeout_seconds=60)
    gateways = Gateways("", "token", timeout_seconds=1)
    states: list[EngineState] = []

    async def note(state: EngineState) -> None:
        states.append(state)

    sync = EngineSync(client, gateways, note, policy="policy", digests={})
    async with httpx.AsyncClient(base_url=engine.base_url, timeout=120, trust_env=False) as http:
        yield Synced(engine, client, sync, states, http)
        await client.pause()
        await client.load(str(engine.model_path), weights_digest(engine.model_path), "default")
        await client.resume()
    await client.close()
    await gateways.close()


@pytest.fixture(scope="module")
def perturbed(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with noise on every weight."""
    folder = tmp_path_factory.mktemp("perturbed") / "model"
    copytree(engine.model_path, folder)
    random = np.random.default_rng(1)
    weights = {
        name: values
        + np.float32(0.5 * values.std() or 0.1) * random.standard_normal(values.shape, np.float32)
        for name, values in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reference(
    folder: Path, prompt: list[int], completion: list[int], temperature: float = 1.0
) -> list[float]:
    """Log-probs of the completion by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])
    return [float(value) for value in chosen[:, 0]]


def published(
    folder: Path, version: str, *, shift: float = 0.0, sha256: str | None = None
) -> PolicyPublished:
    completion = PROMPT[-8:]
    logprobs = [value + shift for value in reference(folder, PROMPT[:-8], completion)]
    return PolicyPublished(
        policy="policy",
        version=PolicyVersion.parse(version),
        weights_path=str(folder),
        weights_sha256=sha256 or weights_digest(folder),
        canary=Canary(
            prompt_ids=PROMPT[:-8], completion_ids=completion, logprobs=logprobs, tolerance=TOLERANCE
        ),
    )


async def generate(
    http: httpx.AsyncClient, max_tokens: int, started: asyncio.Event | None = None
) -> tuple[list[int], list[float], list[dict[str, Any]]]:
    """Tokens, log-probs at temperature 0.7 and version spans of a streamed generation."""
    body = {
        "model": "policy",
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": max_tokens, "temperature": 0.7, "logprobs": 0, "ignore_eos": True},
        "output_mode": "tokens",
        "stream": True,
    }
    tokens: list[int] = []
    logprobs: list[float] = []
    spans: list[dict[str, Any]] = []
    async with http.stream("POST", "/inference/v1/generate", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                tokens += choice["token_ids"]
                logprobs += [item["logprob"] for item in choice["logprobs"]["content"]]
                spans = choice.get("weight_versions") or spans
            if started is not None and len(tokens) >= 5:
                started.set()
    return tokens, logprobs, spans


async def test_generation_goes_on_while_the_weights_change(synced: Synced, perturbed: Path) -> None:
    target = published(perturbed, "run:1")
    before = await synced.client.checksums()
    started = asyncio.Event()
    in_flight = asyncio.create_task(generate(synced.http, 400, started))
    await started.wait()
    await synced.sync.bring_to(target)
    assert not in_flight.done(), "the update came too late to be seen in flight"

    (state,) = synced.states
    assert state.status == "ready"
    assert state.canary_gap is not None
    assert state.canary_gap <= TOLERANCE
    assert await synced.client.weight_version() == "run:1"
    assert not await synced.client.is_paused()
    after = await synced.client.checksums()
    changed = {name.rpartition(":")[2] for name in before if before[name] != after[name]}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= changed

    tokens, logprobs, spans = await in_flight
    assert len(tokens) == len(logprobs) == 400
    assert [span["version"] for span in spans] == ["default", "run:1"]
    change = spans[1]["start"]
    assert 5 <= change < 400
    old = reference(synced.engine.model_path, PROMPT, tokens[:change], 0.7)
    new = reference(perturbed, PROMPT + tokens[:change], tokens[change:], 0.7)
    np.testing.assert_allclose(logprobs[:change], old, atol=TOLERANCE)
    np.testing.assert_allclose(logprobs[change:], new, atol=TOLERANCE)

    # The same prompt again: nothing of the old weights may be left in the prefix cache.
    tokens, logprobs, spans = await generate(synced.http, 32)
    assert [span["version"] for span in spans] == ["run:1"]
    np.testing.assert_allclose(logprobs, reference(perturbed, PROMPT, tokens, 0.7), atol=TOLERANCE)


async def test_a_wrong_digest_is_refused_and_the_old_weights_stay(synced: Synced, perturbed: Path) -> None:
    before = await synced.client.checksums()
    with pytest.raises(EngineError, match="update_weights answers 500"):
        await synced.sync.bring_to(published(perturbed, "run:1", sha256="0" * 64))
    assert await synced.client.checksums() == before
    assert await synced.client.weight_version() == "default"
    assert not await synced.client.is_paused()
    tokens, logprobs, _ = await generate(synced.http, 8)
    np.testing.assert_allclose(
        logprobs, reference(synced.engine.model_path, PROMPT, tokens, 0.7), atol=TOLERANCE
    )


async def test_weights_of_another_model_are_refused(synced: Synced, perturbed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    copytree(perturbed, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = np.ones(64, dtype=np.float32)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    before = await synced.client.checksums()
    policy = published(perturbed, "run:1").model_copy(
        update={"weights_path": str(other), "weights_sha256": weights_digest(other)}
    )
    with pytest.raises(EngineError, match="update_weights answers 500"):
        await synced.sync.bring_to(policy)
    assert await synced.client.checksums() == before
    assert not await synced.client.is_paused()


async def test_a_failed_canary_fences_the_engine_until_the_weights_are_right(
    synced: Synced, perturbed: Path
) -> None:
    with pytest.raises(CanaryError, match=r"differ by 0\.1"):
        await synced.sync.bring_to(published(perturbed, "run:1", shift=0.1))
    assert await synced.client.is_paused()
    waiting = asyncio.create_task(generate(synced.http, 4))
    await synced.sync.bring_to(published(perturbed, "run:2"))
    assert synced.states[-1].status == "ready"
    assert [span["version"] for span in (await waiting)[2]] == ["run:2"]
