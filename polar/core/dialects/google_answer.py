"""Google generateContent: answers, whole and as events.

A stream has no event names, no comments and no `[DONE]`: its clients fail on them. The reasoning
travels sealed with the first call, since Gemini CLI drops thoughts but brings signatures back.
"""

from typing import Any

import orjson

from polar.core.dialects.base import ModelRequest, answer_id
from polar.core.dialects.blocks import Block, Blocks, Step
from polar.core.dialects.engine_answer import Captured
from polar.core.dialects.errors import ApiError
from polar.core.dialects.sealed import seal
from polar.core.dialects.sse import frame
from polar.core.dialects.unparsed import input_of

_FINISH = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}
_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
}


def whole_response(request: ModelRequest, body: dict[str, Any], captured: Captured) -> dict[str, Any]:
    """The answer to an unstreamed call. Raises what `engine_answer.MALFORMED` lists."""
    candidates = []
    for position, choice in enumerate(body["choices"]):
        writer = _Writer(request)
        parts = writer.parts([*writer.blocks.take(choice["message"]), *writer.blocks.close()])
        candidates.append(_candidate(captured, int(choice.get("index", position)), parts, last=True))
    return {**_response(request, captured, candidates), "usageMetadata": _usage(captured)}


class GoogleEvents:
    """Events of a streamed call."""

    def __init__(self, request: ModelRequest, captured: Captured) -> None:
        self._request = request
        self._captured = captured
        self._writers: dict[int, _Writer] = {}

    def on_chunk(self, chunk: dict[str, Any]) -> bytes:
        """See ClientStream."""
        candidates = []
        for choice in chunk["choices"]:
            index = choice.get("index", 0)
            writer = self._writers.setdefault(index, _Writer(self._request))
            if parts := writer.parts(writer.blocks.take(choice.get("delta") or {})):
                candidates.append(_candidate(self._captured, index, parts, last=False))
        if not candidates:
            return b""
        return frame(orjson.dumps(_response(self._request, self._captured, candidates)))

    def ending(self) -> bytes:
        """The last call of each candidate and why it ended: until then its tools are not run."""
        candidates = [
            _candidate(self._captured, index, writer.parts(writer.blocks.close()), last=True)
            for index, writer in sorted(self._writers.items())
        ]
        response = _response(self._request, self._captured, candidates)
        return frame(orjson.dumps({**response, "usageMetadata": _usage(self._captured)}))

    def failure(self, error: ApiError) -> bytes:
        """An error object without SSE's frame, as Google sends it.

        In a frame the JavaScript SDK takes it for an empty answer, and Gemini CLI ends its run.
        """
        return orjson.dumps(error_object(error)) + b"\n"


def error_object(error: ApiError) -> dict[str, Any]:
    """An error in Google's shape, with the pause before a retry where Google puts it."""
    message = error.message
    if error.is_context_overflow:
        overflow = error.overflow
        message = (
            f"The input token count ({overflow[0]}) exceeds the maximum number of tokens allowed "
            f"({overflow[1]})."
            if overflow
            else f"The input token count exceeds the maximum number of tokens allowed: {message}"
        )
    status = _STATUS.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
    fault: dict[str, Any] = {"code": error.status, "message": message, "status": status}
    if error.retry_after is not None:
        retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{error.retry_after}s"}
        fault["details"] = [retry]
    return {"error": fault}


class _Writer:
    """Steps of one candidate as parts."""

    def __init__(self, request: ModelRequest) -> None:
        self._shows_thoughts = bool(request.echoed["shows_thoughts"])
        self._sealed = False
        self.blocks = Blocks()

    def parts(self, steps: list[Step]) -> list[dict[str, Any]]:
        """Texts as they come, a call when it is whole."""
        parts: list[dict[str, Any]] = []
        for what, block, text in steps:
            if block.kind == "tool":
                if what == "stop":
                    parts.append(self._call(block))
            elif what == "delta" and block.kind == "text":
                parts.append({"text": text})
            elif what == "delta" and self._shows_thoughts:
                parts.append({"text": text, "thought": True})
        return parts

    def _call(self, block: Block) -> dict[str, Any]:
        call = {"id": block.call_id, "name": block.name, "args": input_of(block.text)}
        part: dict[str, Any] = {"functionCall": call}
        reasoning = "".join(known.text for known in self.blocks.all if known.kind == "reasoning")
        if reasoning and not self._sealed:
            self._sealed = True
            part["thoughtSignature"] = seal(reasoning)
        return part


def _candidate(captured: Captured, index: int, parts: list[dict[str, Any]], *, last: bool) -> dict[str, Any]:
    # Clients look for a text in the last event too.
    parts = parts or [{"text": ""}]
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": index}
    if last:
        finish = captured.choice(index).finish_reason
        candidate["finishReason"] = _FINISH.get(str(finish), "OTHER")
    return candidate


def _response(request: ModelRequest, captured: Captured, candidates: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "candidates": candidates,
        "modelVersion": request.model,
        "responseId": answer_id(request, captured),
    }


def _usage(captured: Captured) -> dict[str, int]:
    return {
        "promptTokenCount": captured.prompt_tokens,
        "cachedContentTokenCount": captured.cached_tokens,
        "candidatesTokenCount": captured.completion_tokens,
        "totalTokenCount": captured.prompt_tokens + captured.completion_tokens,
    }
