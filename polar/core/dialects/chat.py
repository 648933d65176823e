"""OpenAI Chat Completions: the dialect that is nearest to the canonical form.

What this file does not name is passed on as the engine said it, unknown fields too.
"""

from typing import Any

import orjson

from polar.core.dialects.base import DialectName, Headers, ModelRequest
from polar.core.dialects.body import (
    RequestError,
    body_digest,
    load_object,
    read_choices,
    read_field,
    read_objects,
)
from polar.core.dialects.canonical import canonical_message
from polar.core.dialects.engine_answer import Captured
from polar.core.dialects.engine_body import is_constrained
from polar.core.dialects.engine_stream import DONE
from polar.core.dialects.errors import ApiError
from polar.core.dialects.native_ids import kind_of, native_ids, thread_of
from polar.core.dialects.openai_shapes import OpenAiShapes, error_object
from polar.core.dialects.seen_messages import SeenMessages, split
from polar.core.dialects.sse import frame


class ChatDialect(OpenAiShapes):
    """See the module."""

    name: DialectName = "chat"

    def __init__(self) -> None:
        self._seen = SeenMessages(_message)

    def parse_request(self, raw: bytes, headers: Headers, target: str = "") -> ModelRequest:
        """Read a body. Raises RequestError."""
        del target
        body = split(raw)
        if body is not None and body.messages:
            try:
                messages, known = self._seen.messages(body.messages)
                tools, known_tools = self._seen.tools(body.tools, _tools)
            except ValueError as error:
                if isinstance(error, RequestError):
                    raise
                body = None  # no JSON after all, or nested too deep: that is told of the whole
        if body is None or not body.messages:
            fields = load_object(raw)
            messages, tools = _messages(fields.get("messages")), _tools(fields.get("tools"))
            return self._request(raw, headers, fields, messages=messages, tools=tools)
        return self._request(
            raw, headers, body.fields,
            messages=messages, tools=tools, known_messages=known, known_tools=known_tools,
        )  # fmt: skip

    def _request(
        self, raw: bytes, headers: Headers, fields: dict[str, Any], **conversation: Any
    ) -> ModelRequest:
        options = read_field(fields, "stream_options", dict, {})
        ids = native_ids(headers)
        return ModelRequest(
            dialect="chat",
            fields=fields,
            model=read_field(fields, "model", str, ""),
            stream=read_field(fields, "stream", bool, default=False),
            choices=read_choices(fields.get("n"), "n"),
            include_usage=bool(options.get("include_usage")),
            continuous_usage=bool(options.get("continuous_usage_stats")),
            hide_reasoning=fields.get("include_reasoning") is False,
            single_tool_call=fields.get("parallel_tool_calls") is False,
            constrained=is_constrained(fields),
            digest=body_digest(raw),
            native_ids=ids,
            thread_id=thread_of(ids),
            kind=kind_of(ids),
            **conversation,
        )

    def answer(self, request: ModelRequest, body: dict[str, Any], captured: Captured) -> bytes:
        """The engine's answer under the model's name that was asked for."""
        del captured
        _name_model(body, request)
        return orjson.dumps(body)

    def stream(self, request: ModelRequest, captured: Captured) -> "ChatEvents":
        """See Dialect."""
        return ChatEvents(request, captured)


class ChatEvents:
    """The engine's chunks, cleaned, with what ends the answer kept back."""

    def __init__(self, request: ModelRequest, captured: Captured) -> None:
        self._request = request
        self._captured = captured
        self._held = bytearray()

    def on_chunk(self, chunk: dict[str, Any]) -> bytes:
        """See ClientStream."""
        choices = chunk["choices"]
        finished = self._captured.choices
        ends = not choices and bool(self._held)
        ends = ends or any(finished[c.get("index", 0)].finish_reason is not None for c in choices)
        is_usage_chunk = not choices and chunk.get("usage") is not None
        if is_usage_chunk and not self._request.include_usage:
            return b""
        if choices and not self._request.continuous_usage:
            chunk.pop("usage", None)
        _name_model(chunk, self._request)
        framed = frame(orjson.dumps(chunk))
        if ends or is_usage_chunk:
            self._held += framed
            return b""
        return framed

    def ending(self) -> bytes:
        """Each choice's last chunk, the usage chunk, and `[DONE]` in any case."""
        return bytes(self._held) + frame(DONE)

    def failure(self, error: ApiError) -> bytes:
        """An error object, no finish reason and no `[DONE]`."""
        return frame(orjson.dumps(error_object(error)))


def _name_model(body: dict[str, Any], request: ModelRequest) -> None:
    if request.model and "model" in body:
        body["model"] = request.model


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list with at least one message", "messages")
    return tuple([_message(item, index) for index, item in enumerate(value)])


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    return read_objects(value or [], "tools")


def _message(item: Any, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(item, dict):
        raise RequestError(f"{where} must be an object", where)
    return canonical_message(item, where)
