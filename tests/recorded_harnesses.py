"""Recorded traffic of real agent programs (folder in POLAR_FIXTURES_DIR): requests, and the answers
that a mock gave, in canonical form."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar.core.dialects.base import Dialect, ModelRequest
from polar.core.dialects.chat import ChatDialect
from polar.core.dialects.google import GoogleDialect
from polar.core.dialects.messages import MessagesDialect
from polar.core.dialects.responses import ResponsesDialect
from polar.core.dialects.responses_input import CUSTOM_INPUT, engine_name

FOLDER = os.environ.get("POLAR_FIXTURES_DIR", "")
HARNESSES = ("claude", "codex", "gemini", "mini", "opencode", "pi", "qwen")
MISSING = "POLAR_FIXTURES_DIR names no folder of recorded harnesses"

Message = dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """One recorded model call."""

    scenario: str
    number: int
    request: ModelRequest
    answer: Message | None
    """None: the mock answered with an error."""
    is_whole: bool
    finish_reason: str


def sessions(harness: str) -> Iterator[tuple[str, list[Exchange]]]:
    """The calls of each scenario, in order of arrival."""
    calls: dict[str, list[Exchange]] = {}
    file = Path(FOLDER) / "harnesses" / f"{harness}.jsonl"
    file = file if file.is_file() else Path(FOLDER) / f"{harness}.jsonl"
    for line in file.read_text().splitlines():
        recorded = json.loads(line)
        if recorded["method"] == "POST":
            calls.setdefault(recorded["scenario"], []).append(_exchange(recorded))
    yield from calls.items()


def _exchange(recorded: dict[str, Any]) -> Exchange:
    path = recorded["path"]
    dialect: Dialect
    target = ""
    if path.endswith("/chat/completions"):
        dialect, read = ChatDialect(), _chat
    elif path.endswith("/responses"):
        dialect, read = ResponsesDialect(), _responses
    elif path.endswith("/messages"):
        dialect, read = MessagesDialect(), _messages
    else:
        target, _, method = path.partition("/models/")[2].partition(":")
        dialect, read = GoogleDialect(stream=method.startswith("stream")), _google
    headers = {name.lower().encode(): value.encode("latin-1") for name, value in recorded["headers"]}
    request = dialect.parse_request(json.dumps(recorded["body"]).encode(), headers, target)
    response = recorded["response"]
    if response["status"] != 200:
        return Exchange(recorded["scenario"], recorded["n"], request, None, False, "error")
    body = response["body"]
    events = [event for _, event in body if isinstance(event, dict)] if isinstance(body, list) else [body]
    is_whole = "NO TERMINAL EVENT" not in response.get("note", "")
    answer = _Answer()
    read(answer, events)
    return Exchange(
        recorded["scenario"], recorded["n"], request, answer.message(), is_whole, answer.finish_reason
    )


class _Answer:
    """An answer put together."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.finish_reason = "stop"
        self._calls: dict[Any, Message] = {}

    def call(self, place: Any, call_id: str = "", name: str = "", arguments: str = "") -> None:
        function = {"name": "", "arguments": ""}
        call = self._calls.setdefault(place, {"id": "", "type": "function", "function": function})
        call["id"] = call["id"] or call_id
        call["function"]["name"] += name
        call["function"]["arguments"] += arguments

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self._calls:
            message["tool_calls"] = list(self._calls.values())
        return message


def _chat(answer: _Answer, events: list[Any]) -> None:
    for choice in (choice for event in events for choice in event.get("choices", ())):
        delta = choice.get("delta") or choice.get("message") or {}
        answer.content += delta.get("content") or ""
        answer.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
        for index, call in enumerate(delta.get("tool_calls") or ()):
            function = call.get("function") or {}
            answer.call(
                call.get("index", index), call.get("id") or "",
                function.get("name") or "", function.get("arguments") or "",
            )  # fmt: skip
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _responses(answer: _Answer, events: list[Any]) -> None:
    items = [event["item"] for event in events if event.get("type") == "response.output_item.done"]
    items = items or [item for event in events for item in event.get("output", ())]
    for place, item in enumerate(items):
        if item["type"] == "message":
            answer.content += "".join(part.get("text", "") for part in item["content"])
        elif item["type"] == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            answer.reasoning += "".join(part.get("text", "") for part in parts) or "…"
        elif item["type"] == "function_call":
            name = engine_name(item["name"], item.get("namespace") or "")
            answer.call(place, item["call_id"], name, item["arguments"])
        elif item["type"] == "custom_tool_call":
            arguments = json.dumps({CUSTOM_INPUT: item["input"]})
            answer.call(place, item["call_id"], item["name"], arguments)
    if any(event.get("type") == "response.incomplete" for event in events):
        answer.finish_reason = "length"


def _messages(answer: _Answer, events: list[Any]) -> None:
    for event in events:
        for place, block in enumerate(event.get("content", ())):
            _block(answer, place, block, json.dumps(block.get("input", {})))
        if event.get("type") == "content_block_start":
            _block(answer, event["index"], event["content_block"], "")
        delta = event.get("delta") or {}
        answer.content += delta.get("text", "")
        answer.reasoning += delta.get("thinking", "")
        if "partial_json" in delta:
            answer.call(event["index"], arguments=delta["partial_json"])
        if (delta.get("stop_reason") or event.get("stop_reason")) == "max_tokens":
            answer.finish_reason = "length"


def _block(answer: _Answer, place: int, block: Message, arguments: str) -> None:
    if block["type"] == "tool_use":
        answer.call(place, block["id"], block["name"], arguments)
    answer.content += block.get("text", "")
    answer.reasoning += block.get("thinking", "")


def _google(answer: _Answer, events: list[Any]) -> None:
    place = 0
    for event in events:
        for candidate in event.get("candidates", ()):
            for part in candidate.get("content", {}).get("parts", ()):
                if "functionCall" in part:
                    call = part["functionCall"]
                    answer.call(place, call.get("id") or "", call["name"], json.dumps(call.get("args", {})))
                    place += 1
                elif part.get("thought"):
                    answer.reasoning += part.get("text", "")
                else:
                    answer.content += part.get("text", "")
            if candidate.get("finishReason") == "MAX_TOKENS":
                answer.finish_reason = "length"
