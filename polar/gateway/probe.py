"""Does an engine do what the records will claim? Asked at start and after every outage.

| reason | what was seen |
|---|---|
| engine_down | no connection, or it does not answer |
| engine_serves_other_model | `/v1/models` lacks the policy's name |
| engine_incomplete_ids | prompt ids, sampled ids, log-probs and usage do not agree in number |
| engine_logprobs_mode | log-probs do not follow the temperature: not those of what was sampled |
| engine_generation_config | a request without sampling fields is not sampled neutrally |
| engine_weight_version | its weight version is neither `default` nor lineage:step |

Behaviour is measured, no configuration is believed: the same prompt at temperature 1, at 2 and
without any sampling field. Differences between log-probs of the top tokens are compared, since
those halve at temperature 2 exactly and leave small numerical noise without effect.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polar.core.dialects.base import ModelRequest
from polar.core.dialects.engine_answer import AnswerError, Captured, load_json, read_answer
from polar.core.dialects.engine_body import engine_body
from polar.core.rendering import Renderer
from polar.errors import EngineError
from polar.gateway.engine import (
    PROBE_HEADERS,
    EngineBrokenError,
    EngineClient,
    EngineDownError,
    EngineStatusError,
)
from polar.gateway.rendering_probe import compare_rendering
from polar.gateway.versions import parse_weight_version
from schemas.policies import PolicyVersion
from schemas.tasks import SamplingSpec

PROCESSED = "processed_logprobs"
"""vLLM's name of the log-probs that `judge_logprobs` demands."""
UNVERIFIED = "unverified"
"""In the place of a name: nobody saw which log-probs an engine gives, so its calls are not trained."""

_TOP = 5
_SMALLEST_SPREAD = 1e-3
"""Below this the top tokens are as good as equal and a ratio says nothing."""
_NOISE = 0.02
"""Numerical noise of repeated prompts in bfloat16, in log-prob units, with room to spare."""

_QUESTION = ModelRequest(
    dialect="chat",
    fields={"max_tokens": 2},
    messages=({"role": "user", "content": "Name a colour."},),
)
TopLogprobs = dict[str, float]
"""Token → log-prob of the likeliest tokens at the first position."""


class EngineUnfitError(EngineError):
    """The engine must not serve this gateway; `reason` is a word of the module's table."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a probe found."""

    version: PolicyVersion
    """That the engine runs at present."""
    context_tokens: int | None
    """Longest prompt and answer together; none where the engine does not tell."""
    rendering: str
    """Why prompts cannot be sent as ids; empty when they can."""
    logprobs_mode: str
    """Which log-probs it was seen to give; UNVERIFIED where that was not seen."""


async def probe(engine: EngineClient, model: str, renderer: Renderer | None) -> EngineFacts:
    """Ask whether the engine does what the records will claim. Raises EngineUnfitError."""
    try:
        offered = await engine.models()
        if model not in offered:
            raise EngineUnfitError(
                "engine_serves_other_model",
                f"engine {engine.engine_id} serves {', '.join(offered) or 'no model'}, not {model!r}; "
                f"start it with --served-model-name {model} or set POLAR_GATEWAY_MODEL",
            )
        neutral = await _ask(engine, model, _neutral(1.0))
        warm = await _ask(engine, model, _neutral(2.0))
        bare = await _ask(engine, model, {})
        version = await engine.weight_version()
        rendering = await compare_rendering(engine, model, renderer)
    except EngineDownError as error:
        raise EngineUnfitError("engine_down", str(error)) from error
    except (EngineBrokenError, EngineStatusError) as error:
        raise EngineUnfitError("engine_down", f"{error}; is it still starting?") from error
    judge_logprobs(engine.engine_id, neutral, warm, bare)
    try:
        return EngineFacts(parse_weight_version(version), offered[model], rendering, PROCESSED)
    except ValueError as error:
        raise EngineUnfitError("engine_weight_version", f"engine {engine.engine_id}: {error}") from error


def judge_logprobs(engine_id: str, neutral: TopLogprobs, warm: TopLogprobs, bare: TopLogprobs) -> None:
    """Compare the top log-probs at temperature 1, at 2 and by the engine's own defaults.

    Raises EngineUnfitError.
    """
    spread, warm_spread = _spreads(neutral, warm)
    if spread >= _SMALLEST_SPREAD and warm_spread > 0.75 * spread:
        raise EngineUnfitError(
            "engine_logprobs_mode",
            f"engine {engine_id} gives the same log-probs at every temperature; start it with "
            "--logprobs-mode processed_logprobs",
        )
    spread, bare_spread = _spreads(neutral, bare)
    shift = max((abs(neutral[token] - bare[token]) for token in neutral.keys() & bare.keys()), default=0.0)
    if abs(spread - bare_spread) > _NOISE + 0.05 * spread or shift > _NOISE + 0.05 * spread:
        raise EngineUnfitError(
            "engine_generation_config",
            f"engine {engine_id} samples by defaults of the model's generation_config.json; start it with "
            "--generation-config vllm",
        )


def _spreads(a: TopLogprobs, b: TopLogprobs) -> tuple[float, float]:
    """Largest log-prob difference among tokens that both name: in a, and between the same two in b."""
    shared = sorted(a.keys() & b.keys(), key=lambda token: (a[token], token))
    if len(shared) < 2:
        return 0.0, 0.0
    low, high = shared[0], shared[-1]
    return a[high] - a[low], b[high] - b[low]


def _neutral(temperature: float) -> dict[str, Any]:
    return engine_body(_QUESTION, SamplingSpec(temperature=temperature), trainable=True, model="")[1]


async def _ask(engine: EngineClient, model: str, sampling: Mapping[str, Any]) -> TopLogprobs:
    body, used = engine_body(_QUESTION, SamplingSpec(), trainable=True, model=model)
    body = {name: value for name, value in body.items() if name not in used} | {"max_tokens": 2, **sampling}
    # By ids, since several tokens may have one text. Calls do not ask for that: it makes answers longer.
    named = {"top_logprobs": _TOP, "return_tokens_as_token_ids": True}
    async with engine.chat(body | named, PROBE_HEADERS) as response:
        data = await response.read()
    if response.status != 200:
        raise EngineStatusError(
            f"engine {engine.engine_id} answers {response.status} to a tiny completion: {data[:200]!r}",
            response.status,
            data,
        )
    try:
        answer = load_json(data)
        top = {
            str(entry["token"]): float(entry["logprob"])
            for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        }
        captured, _ = read_answer(data, _QUESTION)
    except (AnswerError, LookupError, TypeError, ValueError) as error:
        raise _incomplete(engine, repr(error)) from error
    if captured.usage is None or not captured.is_complete() or not top:
        raise _incomplete(engine, _counts(captured))
    return top


def _counts(captured: Captured) -> str:
    choice = captured.choice(0)
    return (
        f"{len(captured.prompt_ids)} prompt ids, {len(choice.token_ids)} sampled ids, "
        f"{len(choice.logprobs)} log-probs, usage {captured.usage}"
    )


def _incomplete(engine: EngineClient, detail: str) -> EngineUnfitError:
    return EngineUnfitError(
        "engine_incomplete_ids",
        f"engine {engine.engine_id} does not give token ids and log-probs for every token ({detail}); "
        "vLLM 0.11 or later is needed",
    )
