"""What a client saw of one exchange, read in its dialect."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

Event = dict[str, Any]


class Seen:
    """An answer, whole or as events."""

    def __init__(self, dialect: str, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.dialect = dialect
        self.status = status
        self.text = data.decode()
        self.headers = {name.lower() for name in headers}
        self.is_stream = headers.get("Content-Type", "").startswith("text/event-stream")

    @cached_property
    def frames(self) -> list[str]:
        """The data of each event, as text; Google's error objects stand outside of events."""
        lines = self.text.split("\n") if self.is_stream else []
        begins = ("data: ", "{") if self.dialect == "gemini" else ("data: ",)
        return [line.removeprefix("data: ") for line in lines if line.startswith(begins)]

    @cached_property
    def events(self) -> list[Event]:
        """The data that is JSON."""
        return [json.loads(frame) for frame in self.frames if frame != "[DONE]"]

    @cached_property
    def body(self) -> Any:
        """The whole answer."""
        return json.loads(self.text)

    @property
    def content(self) -> str:
        """The text of the answer."""
        if not self.is_stream:
            return str(self.body["choices"][0]["message"]["content"])
        if self.dialect == "gemini":
            parts = [part for event in self.events for part in event["candidates"][0]["content"]["parts"]]
            return "".join(part.get("text", "") for part in parts)
        return "".join(delta.get("content") or "" for delta in self._deltas())

    @property
    def terminal(self) -> str:
        """How a stream ended."""
        last = self.events[-1]
        if self.frames[-1] == "[DONE]":
            return "done"
        if "error" in last:
            return "in_stream_error" if self.dialect == "gemini" else "error_object"
        return str(last.get("type"))

    @property
    def ended_well(self) -> bool:
        """Whether something in it may be taken for a good end."""
        ends = ("response.completed", "response.incomplete", "message_stop")
        finishes = [choice.get("finish_reason") for choice in self._all("choices")]
        finishes += [candidate.get("finishReason") for candidate in self._all("candidates")]
        return (
            "[DONE]" in self.text or any(finishes) or any(event.get("type") in ends for event in self.events)
        )

    @property
    def tool_calls(self) -> list[dict[str, str]]:
        """Calls of a streamed chat answer."""
        calls: dict[int, dict[str, str]] = {}
        for delta in self._deltas():
            for call in delta.get("tool_calls") or ():
                whole = calls.setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                whole["id"] += call.get("id") or ""
                for name in ("name", "arguments"):
                    whole[name] += call["function"].get(name) or ""
        return list(calls.values())

    def _all(self, name: str) -> list[dict[str, Any]]:
        return [one for event in self.events for one in event.get(name, ())]

    def _deltas(self) -> list[dict[str, Any]]:
        return [choice["delta"] for choice in self._all("choices")]
