"""The engine's chat answer, streamed: event after event, whatever dialect it is for.

Invariant: what is captured is a function of the events alone, and a chunk that is passed on
holds no ids.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from polar.core.dialects.engine_answer import (
    MALFORMED,
    AnswerError,
    Captured,
    CapturedChoice,
    View,
    load_call,
    malformed,
    name_reasoning,
    strip_chunk,
)

DONE = b"[DONE]"


class EngineStream:
    """One streamed answer: captures ids, cleans chunks, puts the messages together."""

    def __init__(self, view: View, choices: int) -> None:
        self._view = view
        self._choices = choices
        self._messages: defaultdict[int, _Message] = defaultdict(_Message)
        self._head: dict[str, Any] = {}
        self.captured = Captured()
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
        return self.done or finished == self._choices

    def on_data(self, data: bytes) -> dict[str, Any] | None:
        """Take one event; the chunk to pass on, if it is one. Raises AnswerError."""
        if data == DONE:
            self.done = True
            return None
        chunk = load_call(data)
        if not isinstance(chunk, dict):
            raise AnswerError("an event of the engine's stream is no JSON object")
        if "error" in chunk:
            error = chunk["error"]
            self.error = str(error.get("message") if isinstance(error, dict) else error)
            return None
        try:
            self._take(chunk)
        except MALFORMED as error:
            raise malformed(error) from error
        return chunk

    def close(self) -> Captured:
        """What is kept, with the messages as far as they were delivered."""
        for index, message in self._messages.items():
            self.captured.choice(index).message = message.whole()
        return self.captured

    def whole_answer(self) -> dict[str, Any]:
        """The answer that an unstreamed call would have got, without ids."""
        captured = self.close()
        choices = [
            {
                "index": index,
                "message": choice.message,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in sorted(captured.choices.items())
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": captured.usage}

    def _take(self, chunk: dict[str, Any]) -> None:
        self.captured.take_head(chunk)
        for choice in chunk["choices"]:
            index = choice.get("index", 0)
            kept = self.captured.choice(index)
            kept.take(choice)
            self._clean_delta(index, kept, choice.get("delta") or {})
            kept.finish(choice)
        strip_chunk(chunk)
        self._head = self._head or {
            name: value for name, value in chunk.items() if name not in ("choices", "usage")
        }

    def _clean_delta(self, index: int, kept: CapturedChoice, delta: dict[str, Any]) -> None:
        name_reasoning(delta)
        if delta.get("reasoning"):
            kept.has_reasoning = True
        if self._view.hide_reasoning:
            delta.pop("reasoning", None)
        message = self._messages[index]
        if calls := delta.get("tool_calls"):
            for call in calls:
                message.place(call)
            if self._view.single_tool_call:
                kept.left_out = kept.left_out or any(call["index"] for call in calls)
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

    def add(self, delta: Mapping[str, Any]) -> None:
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
