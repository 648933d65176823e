"""OpenAI Chat Completions, the answer side: what the engine said → what is kept, what is passed on.

Invariant: token ids and log-probs never reach the harness, everything that this file does not
name does; what is kept is what the engine gave, complete or not, never repaired.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar.core.dialects.chat import ChatRequest

_ENGINE_FIELDS = (
    "prompt_token_ids",
    "prompt_logprobs",
    "prompt_text",
    "kv_transfer_params",
    "ec_transfer_params",
)
_ENGINE_CHOICE_FIELDS = ("token_ids", "logprobs", "routed_experts")
_NO_LOGPROB = -9999.0
"""vLLM's word for minus infinity or for a token without a log-prob."""

MALFORMED = (AttributeError, TypeError, ValueError, LookupError, OverflowError)
"""What reading a value of another shape than expected raises."""


class AnswerError(ValueError):
    """The engine's bytes are no chat answer."""


@dataclass(slots=True)
class CapturedChoice:
    """One answer as the engine sampled it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Natural log-probs; NaN where the engine gave none."""
    message: dict[str, Any] = field(default_factory=dict)
    """The assistant message as the harness gets it."""
    finish_reason: str | None = None

    def take(self, choice: dict[str, Any]) -> None:
        """Add ids and log-probs of an answer's choice or of a stream's chunk."""
        entries = (choice.get("logprobs") or {}).get("content") or []
        self.token_ids.extend(choice.get("token_ids") or [])
        self.logprobs.extend(_logprob(entry.get("logprob")) for entry in entries)

    def finish(self, choice: dict[str, Any]) -> None:
        """Keep the finish reason, if this choice or chunk has one."""
        if choice.get("finish_reason") is not None:
            self.finish_reason = str(choice["finish_reason"])


@dataclass(slots=True)
class Captured:
    """Everything to be kept of one upstream answer, whole or as far as it came."""

    engine_request_id: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    choices: dict[int, CapturedChoice] = field(default_factory=dict)

    def choice(self, index: int) -> CapturedChoice:
        """The choice of this index, made when new."""
        return self.choices.setdefault(index, CapturedChoice())

    def take_head(self, body: dict[str, Any]) -> None:
        """Id, prompt ids and usage from an answer or a chunk."""
        self.engine_request_id = str(body.get("id") or self.engine_request_id)
        ids, usage = body.get("prompt_token_ids"), body.get("usage")
        self.prompt_ids = ids if isinstance(ids, list) else self.prompt_ids
        self.usage = usage if isinstance(usage, dict) else self.usage

    def is_complete(self) -> bool:
        """Whether ids = log-probs = usage, for prompt and answer.

        Usage that did not come contradicts nothing; the engine's probe demands it once.
        """
        choices = self.choices.values()
        counted = self.usage or {}
        sampled = sum(len(choice.token_ids) for choice in choices)
        return (
            bool(choices and self.prompt_ids)
            and all(len(choice.token_ids) == len(choice.logprobs) for choice in choices)
            and counted.get("completion_tokens", sampled) == sampled
            and counted.get("prompt_tokens", len(self.prompt_ids)) == len(self.prompt_ids)
        )


def load_json(data: bytes) -> Any:
    """JSON as engines write it: NaN and Infinity literals count as null. Raises AnswerError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise AnswerError(f"the engine's answer is not JSON: {error}") from error


def capture_answer(data: bytes, request: ChatRequest) -> tuple[Captured, bytes]:
    """(what is kept, body for the harness) of an unstreamed answer. Raises AnswerError."""
    body = load_json(data)
    if not isinstance(body, dict) or not isinstance(body.get("choices"), list):
        raise AnswerError("the engine's answer has no choices")
    captured = Captured()
    try:
        captured.take_head(body)
        for position, choice in enumerate(body["choices"]):
            _take_choice(captured.choice(int(choice.get("index", position))), choice, request)
        strip(body, _ENGINE_FIELDS)
        name_model(body, request)
        return captured, orjson.dumps(body)
    except MALFORMED as error:
        raise AnswerError(f"the engine's answer is malformed: {error!r}") from error


def _take_choice(kept: CapturedChoice, choice: dict[str, Any], request: ChatRequest) -> None:
    kept.take(choice)
    kept.finish(choice)
    message = dict(choice["message"])
    if request.hide_reasoning:
        message.pop("reasoning", None)
    if request.single_tool_call and message.get("tool_calls"):
        message["tool_calls"] = message["tool_calls"][:1]
    kept.message = choice["message"] = message
    strip(choice, _ENGINE_CHOICE_FIELDS)


def strip_chunk(chunk: dict[str, Any]) -> None:
    """Take the engine's fields out of a stream's chunk."""
    strip(chunk, _ENGINE_FIELDS)
    for choice in chunk["choices"]:
        strip(choice, _ENGINE_CHOICE_FIELDS)


def strip(value: dict[str, Any], names: Iterable[str]) -> None:
    """Remove these fields where they are."""
    for name in names:
        value.pop(name, None)


def name_model(body: dict[str, Any], request: ChatRequest) -> None:
    """The harness reads the model's name that it asked for."""
    if request.model and "model" in body:
        body["model"] = request.model


def _logprob(value: Any) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= _NO_LOGPROB:
        return math.nan
    return float(value)
