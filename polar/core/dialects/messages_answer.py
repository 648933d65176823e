"""Anthropic Messages: answers, whole and as events.

A call's input is sent when it is whole and known to be a JSON object, as the provider does, except
to tools that ask for eager streaming. Input that is no object arrives as one that says so, in
Claude Code's own way; the harness tells the model, and the history comes back as it was.
"""

from typing import Any

import orjson

from polar.core.dialects.base import ModelRequest, answer_id
from polar.core.dialects.blocks import Block, Blocks, Step
from polar.core.dialects.engine_answer import Captured
from polar.core.dialects.errors import ApiError
from polar.core.dialects.sealed import seal
from polar.core.dialects.unparsed import input_of

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def whole_message(request: ModelRequest, body: dict[str, Any], captured: Captured) -> dict[str, Any]:
    """The answer to an unstreamed call. Raises what `engine_answer.MALFORMED` lists."""
    blocks = Blocks()
    blocks.take(body["choices"][0]["message"])
    message = _message(request, captured)
    reason, sequence = _stop(captured, blocks)
    return {
        **message,
        "content": [_content(request, block) for block in blocks.all],
        "stop_reason": reason,
        "stop_sequence": sequence,
    }


class MessageEvents:
    """Events of a streamed call."""

    def __init__(self, request: ModelRequest, captured: Captured) -> None:
        self._request = request
        self._captured = captured
        self._blocks = Blocks()
        self._begun = False

    def on_chunk(self, chunk: dict[str, Any]) -> bytes:
        """See ClientStream."""
        out: list[bytes] = []
        if not self._begun:
            self._begun = True
            message = _message(self._request, self._captured)
            out.append(event("message_start", {"type": "message_start", "message": message}))
        for choice in chunk["choices"]:
            out += map(self._step, self._blocks.take(choice.get("delta") or {}))
        return b"".join(out)

    def ending(self) -> bytes:
        """The end of the last block, and of the message: until then its tools are not run."""
        out = [self._step(step) for step in self._blocks.close()]
        reason, sequence = _stop(self._captured, self._blocks)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        end = {"type": "message_delta", "delta": delta, "usage": _usage(self._captured)}
        out.append(event("message_delta", end))
        out.append(event("message_stop", {"type": "message_stop"}))
        return b"".join(out)

    def failure(self, error: ApiError) -> bytes:
        """An `error` event."""
        return event("error", error_object(error))

    def _step(self, step: Step) -> bytes:
        block = step.block
        if step.what == "start":
            start = {"type": "content_block_start", "index": block.index, "content_block": _empty(block)}
            return event("content_block_start", start)
        if step.what == "delta":
            return self._grown(block, step.text)
        return self._held_back(block) + event(
            "content_block_stop", {"type": "content_block_stop", "index": block.index}
        )

    def _grown(self, block: Block, text: str) -> bytes:
        if block.kind == "text":
            return _delta(block, {"type": "text_delta", "text": text})
        if block.kind == "reasoning":
            if self._request.echoed["omits_thinking"]:
                return b""
            return _delta(block, {"type": "thinking_delta", "thinking": text})
        if self._is_eager(block):
            return _delta(block, {"type": "input_json_delta", "partial_json": text})
        return b""

    def _held_back(self, block: Block) -> bytes:
        """What is sent of a block only when it is whole."""
        if block.kind == "reasoning":
            signature = _signature(self._request, block)
            return _delta(block, {"type": "signature_delta", "signature": signature})
        if block.kind == "tool" and not self._is_eager(block):
            text = orjson.dumps(input_of(block.text)).decode()
            return _delta(block, {"type": "input_json_delta", "partial_json": text})
        return b""

    def _is_eager(self, block: Block) -> bool:
        asked = self._request.asked_tools.get(block.name)
        return asked is not None and asked.is_eager


def error_object(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's shape; harnesses compact their history on `prompt is too long`."""
    message = error.message
    if error.is_context_overflow:
        overflow = error.overflow
        detail = f"{overflow[0]} tokens > {overflow[1]} maximum" if overflow else message
        message = f"prompt is too long: {detail}"
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def event(name: str, value: dict[str, Any]) -> bytes:
    """One event; its clients need the name."""
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


def _message(request: ModelRequest, captured: Captured) -> dict[str, Any]:
    return {
        "id": f"msg_{answer_id(request, captured)}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(captured),
    }


def _content(request: ModelRequest, block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        thinking = "" if request.echoed["omits_thinking"] else block.text
        return {"type": "thinking", "thinking": thinking, "signature": _signature(request, block)}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": input_of(block.text)}


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _signature(request: ModelRequest, block: Block) -> str:
    """Carries the thinking where the harness does not want to see it."""
    return seal(block.text if request.echoed["omits_thinking"] else "")


def _delta(block: Block, delta: dict[str, Any]) -> bytes:
    value = {"type": "content_block_delta", "index": block.index, "delta": delta}
    return event("content_block_delta", value)


def _stop(captured: Captured, blocks: Blocks) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence); whatever is no ordinary end counts as cut off."""
    choice = captured.choice(0)
    if choice.finish_reason not in ("stop", "tool_calls"):
        return "max_tokens", None
    if blocks.used_tools:
        return "tool_use", None
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return "end_turn", None


def _usage(captured: Captured) -> dict[str, Any]:
    """Cached tokens are counted apart; harnesses add the fields up."""
    cached = min(captured.cached_tokens, captured.prompt_tokens)
    return {
        "input_tokens": captured.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": captured.completion_tokens,
    }
