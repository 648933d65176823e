"""The engine's chat answer, unstreamed: what is kept of it, what is passed on.

Invariant: token ids and log-probs never reach the harness, everything that this file does not
name may; what is kept is what the engine gave, complete or not, never repaired.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from polar.core.dialects.answer_json import Logprobs, clean, load_answer
from polar.core.token_text import TokenText

_ENGINE_FIELDS = (
    "prompt_token_ids",
    "prompt_logprobs",
    "prompt_text",
    "kv_transfer_params",
    "ec_transfer_params",
)
_ENGINE_CHOICE_FIELDS = ("token_ids", "logprobs", "routed_experts")
_SHORT = 2048
"""Bytes up to which reading everything is the least work: most chunks of streams."""
MALFORMED = (AttributeError, TypeError, ValueError, LookupError, OverflowError)
"""What reading a value of another shape than expected raises."""


class AnswerError(ValueError):
    """The engine's bytes are no chat answer."""


class View(Protocol):
    """What of an answer its harness wants to see."""

    @property
    def hide_reasoning(self) -> bool:
        """Reasoning is left out."""

    @property
    def single_tool_call(self) -> bool:
        """Tool calls after the first are left out."""


@dataclass(slots=True)
class CapturedChoice:
    """One answer as the engine sampled it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Natural log-probs; NaN where the engine gave none."""
    message: dict[str, Any] = field(default_factory=dict)
    """The assistant message as the harness gets it."""
    finish_reason: str | None = None
    stop_reason: Any = None
    """The stop string that ended the answer; an id or null where it was none."""
    has_reasoning: bool = False
    """Also when the harness does not want to see it."""
    left_out: bool = False
    """It has more tool calls than the harness wants to see."""

    def take(self, choice: dict[str, Any]) -> None:
        """Add ids and log-probs of an answer's choice or of a stream's chunk."""
        logprobs = choice.get("logprobs") or {}
        self.token_ids.extend(choice.get("token_ids") or [])
        if isinstance(logprobs, Logprobs):
            self.logprobs.extend(logprobs)
        else:
            self.logprobs.extend([clean(entry.get("logprob")) for entry in logprobs.get("content") or ()])

    def finish(self, choice: dict[str, Any]) -> None:
        """Keep the finish reason, if this choice or chunk has one."""
        if choice.get("finish_reason") is not None:
            self.finish_reason = str(choice["finish_reason"])
            self.stop_reason = choice.get("stop_reason")


@dataclass(slots=True)
class Captured:
    """Everything to be kept of one upstream answer, whole or as far as it came."""

    engine_request_id: str = ""
    created: int = 0
    """Unix seconds, by the engine's clock."""
    prompt_ids: list[int] | TokenText = field(default_factory=list)
    usage: dict[str, Any] | None = None
    choices: dict[int, CapturedChoice] = field(default_factory=dict)

    def choice(self, index: int) -> CapturedChoice:
        """The choice of this index, made when new."""
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = CapturedChoice()
        return found

    def take_head(self, body: dict[str, Any]) -> None:
        """Id, prompt ids and usage from an answer or a chunk."""
        self.engine_request_id = str(body.get("id") or self.engine_request_id)
        created, ids, usage = body.get("created"), body.get("prompt_token_ids"), body.get("usage")
        self.created = created if isinstance(created, int) else self.created
        self.prompt_ids = ids if isinstance(ids, (list, TokenText)) else self.prompt_ids
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

    @property
    def prompt_tokens(self) -> int:
        """As the engine counts, or as its ids say."""
        return _count(self.usage, "prompt_tokens", len(self.prompt_ids))

    @property
    def completion_tokens(self) -> int:
        """Over all choices, as the engine counts, or as its ids say."""
        sampled = sum(len(choice.token_ids) for choice in self.choices.values())
        return _count(self.usage, "completion_tokens", sampled)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine had in its cache; 0 where it does not say."""
        details = (self.usage or {}).get("prompt_tokens_details")
        return _count(details, "cached_tokens", 0)


def load_json(data: bytes) -> Any:
    """JSON as engines write it: NaN and Infinity literals count as null. Raises AnswerError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise AnswerError(f"the engine's answer is not JSON: {error}") from error


def load_call(data: bytes) -> Any:
    """The same of an answer to a call, or a chunk of one; ids and log-probs may come as TokenText and
    Logprobs."""
    if len(data) < _SHORT:
        return load_json(data)
    try:
        return load_answer(data)
    except MALFORMED:
        return load_json(data)


def read_answer(data: bytes, view: View) -> tuple[Captured, dict[str, Any]]:
    """(what is kept, answer without ids) of an unstreamed answer. Raises AnswerError."""
    body = load_call(data)
    if not isinstance(body, dict) or not isinstance(body.get("choices"), list):
        raise AnswerError("the engine's answer has no choices")
    captured = Captured()
    try:
        captured.take_head(body)
        for position, choice in enumerate(body["choices"]):
            _take_choice(captured.choice(int(choice.get("index", position))), choice, view)
        _strip(body, _ENGINE_FIELDS)
    except MALFORMED as error:
        raise malformed(error) from error
    return captured, body


def malformed(error: Exception) -> AnswerError:
    """What to raise from an error of reading."""
    return AnswerError(f"the engine's answer is malformed: {error!r}")


def name_reasoning(said: dict[str, Any]) -> None:
    """Give reasoning its canonical name in a message or delta: some engines say it under another
    name, some under both."""
    if "reasoning_content" in said:
        reasoning = said.pop("reasoning_content")
        if reasoning and not said.get("reasoning"):
            said["reasoning"] = reasoning


def strip_chunk(chunk: dict[str, Any]) -> None:
    """Take the engine's fields out of a stream's chunk."""
    _strip(chunk, _ENGINE_FIELDS)
    for choice in chunk["choices"]:
        _strip(choice, _ENGINE_CHOICE_FIELDS)


def _take_choice(kept: CapturedChoice, choice: dict[str, Any], view: View) -> None:
    kept.take(choice)
    kept.finish(choice)
    message = dict(choice["message"])
    name_reasoning(message)
    kept.has_reasoning = bool(message.get("reasoning"))
    if view.hide_reasoning:
        message.pop("reasoning", None)
    if view.single_tool_call and message.get("tool_calls"):
        kept.left_out = len(message["tool_calls"]) > 1
        message["tool_calls"] = message["tool_calls"][:1]
    kept.message = choice["message"] = message
    _strip(choice, _ENGINE_CHOICE_FIELDS)


def _strip(value: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        value.pop(name, None)


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _count(counts: Any, name: str, default: int) -> int:
    value = counts.get(name) if isinstance(counts, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default
