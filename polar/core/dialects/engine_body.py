"""A request in canonical form → the body for the engine.

Invariant: in a trainable session nothing that the harness sends moves the distribution that
is sampled from, except by grammar (`constrained`), and that is marked. Only fields named
here reach the engine; among those left out are the engine's own controls (`kv_transfer_params`
would let a harness put its own prompt ids in place of its messages).
"""

from collections.abc import Mapping
from typing import Any, Literal

from polar.core.dialects.base import ModelRequest
from schemas.tasks import SamplingSpec

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
READ_FIELDS = tuple(dict.fromkeys((*_DISTRIBUTION, *_LIMITS, *_CONSTRAINTS, *_PASSED)))
"""Fields of a request that are looked at here."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Words for `reasoning_effort` that engines know; `none` renders a prompt without thinking."""
_NEUTRAL: Mapping[str, float] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sent by name, so that no default of an engine can stand in for them."""

ReasoningField = Literal["reasoning", "reasoning_content"]
"""What engines call the reasoning in an assistant message. The canonical form has the first."""


def engine_body(
    request: ModelRequest, sampling: SamplingSpec, *, trainable: bool, model: str, stream: bool | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(body for the engine, its sampling fields for the record).

    The record's `temperature` is always there. `sampling.max_tokens` caps the harness's limit.
    `stream`: how the engine answers; none: as the harness wants it.
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
        "stream": request.stream if stream is None else stream,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
    }
    if request.tools:
        is_strict = trainable and any(map(_is_strict, request.tools))
        body["tools"] = [_unstrict(tool) for tool in request.tools] if is_strict else request.tools
    if body["stream"]:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": request.continuous_usage}
    used |= {name: passed[name] for name in (*_LIMITS, *_CONSTRAINTS) if name in passed}
    return body, used


def count_body(request: ModelRequest, *, model: str) -> dict[str, Any]:
    """Body for the engine's tokenizer: the prompt that `engine_body` would make."""
    fields = request.fields
    kwargs = fields.get("chat_template_kwargs")
    body: dict[str, Any] = {"model": model, "messages": request.messages, "add_generation_prompt": True}
    if request.tools:
        body["tools"] = request.tools
    if kwargs is not None:
        body["chat_template_kwargs"] = kwargs
    return body


def name_reasoning(body: Mapping[str, Any], name: ReasoningField) -> Mapping[str, Any]:
    """The body for an engine that reads reasoning under this name and no other."""
    if name == "reasoning":
        return body
    return {**body, "messages": [_with_reasoning_as(name, message) for message in body["messages"]]}


def sampling_asked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields about sampling, as the harness sent them, under chat's names."""
    names = (*_DISTRIBUTION, *_LIMITS, *_CONSTRAINTS)
    return {name: fields[name] for name in names if fields.get(name) is not None}


def is_constrained(fields: Mapping[str, Any]) -> bool:
    """Whether a grammar shapes the answer: structured output or a forced tool choice."""
    choice = fields.get("tool_choice")
    shape = fields.get("response_format")
    free_text = shape is None or (isinstance(shape, dict) and shape.get("type") in (None, "text"))
    return (
        isinstance(choice, dict)
        or choice == "required"
        or not free_text
        or any(fields.get(name) is not None for name in _GRAMMARS)
    )


def _with_reasoning_as(name: str, message: dict[str, Any]) -> dict[str, Any]:
    if "reasoning" not in message:
        return message
    return {name if field == "reasoning" else field: value for field, value in message.items()}


def _is_strict(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and bool(function.get("strict"))


def _unstrict(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool without `strict`: with it engines put even a free answer under a grammar."""
    if not _is_strict(tool):
        return tool
    return {**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}}


def _token_limit(fields: Mapping[str, Any], sampling: SamplingSpec) -> Any:
    asked = fields.get("max_completion_tokens")
    if asked is None:
        asked = fields.get("max_tokens")
    if sampling.max_tokens is None:
        return asked
    if isinstance(asked, int) and not isinstance(asked, bool):
        return min(asked, sampling.max_tokens)
    return sampling.max_tokens if asked is None else asked
