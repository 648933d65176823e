"""OpenAI Chat Completions, streamed: chunk after chunk, passed on as it comes.

Invariant: what ends the answer (each choice's last chunk, the usage chunk, `[DONE]`) is kept
back in `held` until the caller knows that the call is recorded; all before it flows at once.
"""

from typing import Any

import orjson

from polar.core.dialects.chat import ChatRequest, error_body
from polar.core.dialects.chat_answer import (
    MALFORMED,
    AnswerError,
    Captured,
    load_json,
    name_model,
    strip_chunk,
)
from polar.core.dialects.sse import frame

DONE = b"[DONE]"


class ChatStream:
    """One streamed answer: captures ids, cleans chunks, puts the message together."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._messages: dict[int, _Message] = {}
        self.captured = Captured()
        self.held = bytearray()
        """Frames that end the answer."""
        self.done = False
        """`[DONE]` came."""
        self.error: str | None = None
        """The engine reported an error inside the stream."""

    @property
    def is_whole(self) -> bool:
        """Whether the answer came to its end: `[DONE]`, or a finish reason for every choice."""
        if self.error is not None:
            return False
        finished = sum(c.finish_reason is not None for c in self.captured.choices.values())
        return self.done or finished == self._request.choices

    @property
    def ending(self) -> bytes:
        """What ends the stream for the harness, `[DONE]` in any case."""
        return bytes(self.held) if self.done else bytes(self.held) + frame(DONE)

    def on_data(self, data: bytes) -> bytes:
        """Take one event; returns the bytes to send at once. Raises AnswerError."""
        if data == DONE:
            self.done = True
            self.held += frame(DONE)
            return b""
        chunk = load_json(data)
        if not isinstance(chunk, dict):
            raise AnswerError("an event of the engine's stream is no JSON object")
        if "error" in chunk:
            error = chunk["error"]
            self.error = str(error.get("message") if isinstance(error, dict) else error)
            return b""
        try:
            return self._on_chunk(chunk)
        except MALFORMED as error:
            raise AnswerError(f"a chunk of the engine's stream is malformed: {error!r}") from error

    def close(self) -> Captured:
        """What is kept, with the messages as far as they were delivered."""
        for index, message in self._messages.items():
            self.captured.choice(index).message = message.whole()
        return self.captured

    def _on_chunk(self, chunk: dict[str, Any]) -> bytes:
        self.captured.take_head(chunk)
        choices = chunk["choices"]
        ends = not choices and bool(self.held)
        for choice in choices:
            index = choice.get("index", 0)
            kept = self.captured.choice(index)
            kept.take(choice)
            self._clean_delta(index, choice.get("delta") or {})
            kept.finish(choice)
            ends = ends or kept.finish_reason is not None
        is_usage_chunk = not choices and chunk.get("usage") is not None
        if is_usage_chunk and not self._request.include_usage:
            return b""
        if choices and not self._request.continuous_usage:
            chunk.pop("usage", None)
        strip_chunk(chunk)
        name_model(chunk, self._request)
        framed = frame(orjson.dumps(chunk))
        if ends or is_usage_chunk:
            self.held += framed
            return b""
        return framed

    def _clean_delta(self, index: int, delta: dict[str, Any]) -> None:
        if self._request.hide_reasoning:
            delta.pop("reasoning", None)
        message = self._messages.setdefault(index, _Message())
        if calls := delta.get("tool_calls"):
            for call in calls:
                message.place(call)
            if self._request.single_tool_call:
                delta["tool_calls"] = calls = [call for call in calls if call["index"] == 0]
                if not calls:
                    del delta["tool_calls"]
        message.add(delta)


class _Message:
    """An assistant message put together from deltas."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []
        self._places = 0
        self._place_of: dict[int, int] = {}
        self._ids: dict[int, str] = {}

    def place(self, call: dict[str, Any]) -> None:
        """Give a tool call its own index: engines were seen to begin a second call (another id)
        under the index of the first, which clients would join into one."""
        told = call.get("index") or 0
        name = call.get("id")
        if told not in self._place_of or (name and self._ids.get(told) and name != self._ids[told]):
            self._place_of[told] = self._places
            self._places += 1
        if name:
            self._ids[told] = name
        call["index"] = self._place_of[told]

    def add(self, delta: dict[str, Any]) -> None:
        for name, value in delta.items():
            if name == "tool_calls":
                for call in value or ():
                    self._add_call(call)
            elif isinstance(value, str):
                if name == "role":
                    self._texts["role"] = [value]
                else:
                    self._texts.setdefault(name, []).append(value)

    def _add_call(self, call: dict[str, Any]) -> None:
        while len(self._calls) <= call["index"]:
            self._calls.append({"id": "", "type": "function", "function": {"name": ""}})
            self._arguments.append([])
        whole = self._calls[call["index"]]
        whole["id"] = call.get("id") or whole["id"]
        whole["type"] = call.get("type") or whole["type"]
        function = call.get("function") or {}
        whole["function"]["name"] += function.get("name") or ""
        # Added to a text: another type than text fails here and not at the end.
        self._arguments[call["index"]].append("" + (function.get("arguments") or ""))

    def whole(self) -> dict[str, Any]:
        """The message so far."""
        message: dict[str, Any] = {"role": "assistant", "content": None}
        message |= {name: "".join(parts) for name, parts in self._texts.items()}
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "".join(parts)}}
                for call, parts in zip(self._calls, self._arguments, strict=True)
            ]
        return message


def error_frame(message: str, kind: str, code: str | None = None) -> bytes:
    """How a stream that broke off tells its client: an error object and no `[DONE]`."""
    return frame(orjson.dumps(error_body(message, kind, code)))
