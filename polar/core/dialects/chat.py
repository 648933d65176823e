"""OpenAI Chat Completions, the request side: bytes → checked request → body for the engine.

Invariant: in a trainable session nothing that the harness sends moves the distribution that
is sampled from, except by grammar (`constrained`), and that is marked. Only fields named
here reach the engine; among those left out are the engine's own controls (`kv_transfer_params`
would let a harness put its own prompt ids in place of its messages).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from schemas.base import digest
from schemas.tasks import SamplingSpec

MAX_NESTING = 100
"""Deepest nesting of a request; records nest it a little deeper, and JSON encoders end at 255."""
MAX_CHOICES = 64

_DISTRIBUTION = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "seed", "min_tokens", "ignore_eos", "allowed_token_ids",
    "bad_words", "thinking_token_budget", "use_beam_search", "length_penalty", "repetition_detection",
)  # fmt: skip
"""Fields that shape what is sampled: forced in a trainable session, passed on in others."""
_LIMITS = ("max_tokens", "max_completion_tokens", "n", "stop", "stop_token_ids")
_GRAMMARS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
_CONSTRAINTS = ("response_format", "tool_choice", "parallel_tool_calls", *_GRAMMARS)
_PASSED = (
    "tool_choice", "response_format", *_GRAMMARS, "stop", "stop_token_ids", "reasoning_effort",
    "chat_template_kwargs", "documents", "add_generation_prompt", "continue_final_message",
    "mm_processor_kwargs", "skip_special_tokens", "user",
)  # fmt: skip
_NEUTRAL: Mapping[str, float] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sent by name, so that no default of an engine can stand in for them."""


class RequestError(ValueError):
    """The body is no chat request; `param` names the field at fault, if it is one field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request as the harness means it."""

    fields: Mapping[str, Any]
    """The parsed body."""
    messages: tuple[dict[str, Any], ...]
    """Canonical messages: `reasoning_content` is called `reasoning`, everything else as sent."""
    tools: tuple[dict[str, Any], ...]
    model: str
    stream: bool
    choices: int
    """`n`: how many answers are asked for."""
    include_usage: bool
    """Whether a stream's usage chunk belongs to the harness's view."""
    continuous_usage: bool
    hide_reasoning: bool
    single_tool_call: bool
    """`parallel_tool_calls: false`."""
    constrained: bool
    """A grammar shapes the answer: structured output or a forced tool choice."""
    digest: str
    """Digest of the body's bytes; equal bodies are retries or deliberate repeats."""

    @property
    def sampling_asked(self) -> dict[str, Any]:
        """The fields about sampling, as sent."""
        names = (*_DISTRIBUTION, *_LIMITS, *_CONSTRAINTS)
        return {name: self.fields[name] for name in names if self.fields.get(name) is not None}


def parse_request(raw: bytes) -> ChatRequest:
    """Read a body. Raises RequestError naming what is wrong with it."""
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("the request body must be a JSON object")
    if raw.count(b"{") + raw.count(b"[") > MAX_NESTING and _deeper_than(fields, MAX_NESTING):
        raise RequestError(f"the request body is nested deeper than {MAX_NESTING} levels")
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError("stream_options must be an object", "stream_options")
    return ChatRequest(
        fields=fields,
        messages=_messages(fields.get("messages")),
        tools=_objects(fields.get("tools") or [], "tools"),
        model=_typed(fields, "model", str, ""),
        stream=_typed(fields, "stream", bool, default=False),
        choices=_choices(fields.get("n")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        hide_reasoning=fields.get("include_reasoning") is False,
        single_tool_call=fields.get("parallel_tool_calls") is False,
        constrained=_is_constrained(fields),
        digest=digest(raw),
    )


def engine_body(
    request: ChatRequest, sampling: SamplingSpec, *, trainable: bool, model: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(body for the engine, its sampling fields for the record).

    The record's `temperature` is always there. `sampling.max_tokens` caps the harness's limit.
    """
    fields = request.fields
    used: dict[str, Any]
    if trainable:
        used = {"temperature": sampling.temperature, **_NEUTRAL}
    else:
        used = {name: fields[name] for name in _DISTRIBUTION if fields.get(name) is not None}
        used.setdefault("temperature", 1.0)
    limit = _token_limit(fields, sampling)
    if limit is not None:
        used["max_tokens"] = limit
    if request.choices > 1:
        used["n"] = request.choices
    passed = {name: fields[name] for name in _PASSED if fields.get(name) is not None}
    if not trainable and request.single_tool_call:
        passed["parallel_tool_calls"] = False
    body: dict[str, Any] = {
        **passed,
        **used,
        "model": model,
        "messages": request.messages,
        "stream": request.stream,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if request.tools:
        body["tools"] = [_unstrict(tool) for tool in request.tools] if trainable else request.tools
    if request.stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": request.continuous_usage}
    used |= {name: passed[name] for name in (*_LIMITS, *_CONSTRAINTS) if name in passed}
    return body, used


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _is_constrained(fields: Mapping[str, Any]) -> bool:
    choice = fields.get("tool_choice")
    shape = fields.get("response_format")
    free_text = shape is None or (isinstance(shape, dict) and shape.get("type") in (None, "text"))
    return (
        isinstance(choice, dict)
        or choice == "required"
        or not free_text
        or any(fields.get(name) is not None for name in _GRAMMARS)
    )


def _unstrict(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool without `strict`: with it engines put even a free answer under a grammar."""
    function = tool.get("function")
    if isinstance(function, dict) and function.get("strict"):
        return {**tool, "function": {k: v for k, v in function.items() if k != "strict"}}
    return tool


def _token_limit(fields: Mapping[str, Any], sampling: SamplingSpec) -> Any:
    asked = fields.get("max_completion_tokens")
    if asked is None:
        asked = fields.get("max_tokens")
    if sampling.max_tokens is None:
        return asked
    if isinstance(asked, int) and not isinstance(asked, bool):
        return min(asked, sampling.max_tokens)
    return sampling.max_tokens if asked is None else asked


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    messages = _objects(value, "messages")
    if not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}].role must be a string", f"messages[{index}].role")
    return tuple(map(_canonical_message, messages))


def _canonical_message(message: dict[str, Any]) -> dict[str, Any]:
    if "reasoning_content" not in message:
        return message
    renamed = dict(message)
    reasoning = renamed.pop("reasoning_content")
    if reasoning is not None and renamed.get("reasoning") is None:
        renamed["reasoning"] = reasoning
    return renamed


def _objects(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list", name)
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise RequestError(f"{name}[{index}] must be an object", f"{name}[{index}]")
    return tuple(value)


def _typed(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise RequestError(f"{name} must be a {kind.__name__}", name)
    return value


def _choices(value: Any) -> int:
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_CHOICES:
        raise RequestError(f"n must be a whole number from 1 to {MAX_CHOICES}", "n")
    return value


def _deeper_than(value: Any, limit: int) -> bool:
    """Level by level, so that the depth costs no recursion."""
    level: list[Any] = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True
