"""Answers read as a client of each dialect reads them, and given back as its history.

Written against the protocols, not against our writers: recorded answers of other servers are read
by the same code.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from polar.core.dialects.base import Dialect
from polar.core.dialects.chat import ChatDialect
from polar.core.dialects.google import GoogleDialect
from polar.core.dialects.messages import MessagesDialect
from polar.core.dialects.responses import ResponsesDialect

Event = dict[str, Any]
DIALECTS: dict[str, Dialect] = {
    "chat": ChatDialect(),
    "responses": ResponsesDialect(),
    "messages": MessagesDialect(),
    "google": GoogleDialect(stream=True),
}


@dataclass
class Read:
    """What a client understood."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """(name, arguments): a text, or an object where the protocol has objects."""
    finish: str = ""
    whole: Any = None
    """The answer as the client keeps it for its history."""


def events_of(data: bytes) -> list[Event]:
    """The JSON of each event of a stream."""
    lines = [line for line in data.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def read_stream(dialect: str, events: list[Event]) -> Read:
    """A streamed answer."""
    if dialect == "chat":
        return read_whole("chat", _chat_message(events))
    if dialect == "responses":
        items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        (end,) = [e for e in events if e["type"] in ("response.completed", "response.incomplete")]
        assert end["response"].get("output", items) == items
        return read_whole("responses", end["response"] | {"output": items})
    if dialect == "messages":
        return read_whole("messages", _message(events))
    parts = [part for e in events for part in e["candidates"][0]["content"]["parts"]]
    last = events[-1]["candidates"][0]
    merged = {"content": {"role": "model", "parts": parts}, "finishReason": last.get("finishReason", "")}
    return read_whole("google", {"candidates": [merged]})


def read_whole(dialect: str, body: Any) -> Read:
    """An unstreamed answer."""
    read = Read(whole=body)
    if dialect == "chat":
        choice = body["choices"][0]
        message = choice["message"]
        read.text = message.get("content") or ""
        read.reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        read.calls = [(call["name"], call["arguments"]) for call in calls]
        read.finish = choice["finish_reason"]
    elif dialect == "responses":
        _read_items(read, body["output"])
        read.finish = body["status"]
    elif dialect == "messages":
        for block in body["content"]:
            if block["type"] == "text":
                read.text += block["text"]
            elif block["type"] == "thinking":
                read.reasoning += block["thinking"]
            else:
                read.calls.append((block["name"], block["input"]))
        read.finish = body["stop_reason"]
    else:
        candidate = body["candidates"][0]
        for part in candidate["content"]["parts"]:
            if "functionCall" in part:
                read.calls.append((part["functionCall"]["name"], part["functionCall"]["args"]))
            elif part.get("thought"):
                read.reasoning += part["text"]
            else:
                read.text += part["text"]
        read.finish = candidate["finishReason"]
    return read


def history(dialect: str, whole: Any) -> dict[str, Any]:
    """A request whose history is a question and this answer, as a client sends it back."""
    if dialect == "chat":
        return {"messages": [{"role": "user", "content": "hi"}, whole["choices"][0]["message"]]}
    if dialect == "responses":
        return {"input": [{"type": "message", "role": "user", "content": "hi"}, *whole["output"]]}
    if dialect == "messages":
        answer = {"role": "assistant", "content": whole["content"]}
        return {"messages": [{"role": "user", "content": "hi"}, answer]}
    return {"contents": [{"parts": [{"text": "hi"}]}, whole["candidates"][0]["content"]]}


def _read_items(read: Read, items: list[Event]) -> None:
    for item in items:
        if item["type"] == "message":
            read.text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            read.reasoning += "".join(part["text"] for part in item["summary"])
        elif item["type"] == "custom_tool_call":
            read.calls.append((item["name"], json.dumps({"input": item["input"]})))
        else:
            name = f"{item['namespace']}__{item['name']}" if item.get("namespace") else item["name"]
            read.calls.append((name, item["arguments"]))


def _chat_message(events: list[Event]) -> Any:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    finish = ""
    for choice in [choice for event in events for choice in event["choices"]]:
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
            message["reasoning"] = message.get("reasoning", "") + reasoning
        for call in delta.get("tool_calls") or ():
            function = {"name": "", "arguments": ""}
            whole = calls.setdefault(call["index"], {"id": "", "type": "function", "function": function})
            whole["id"] = call.get("id") or whole["id"]
            for name in function:
                whole["function"][name] += call["function"].get(name) or ""
        finish = choice.get("finish_reason") or finish
    if calls:
        message["tool_calls"] = list(calls.values())
    return {"choices": [{"message": message, "finish_reason": finish}]}


def _message(events: list[Event]) -> Any:
    whole: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            whole = {**event["message"], "content": []}
        elif kind == "content_block_start":
            assert event["index"] == len(whole["content"])
            whole["content"].append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            block, delta = whole["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] = block.get(name, "") + delta[name]
        elif kind == "message_delta":
            whole |= event["delta"]
    for index, text in inputs.items():
        try:
            whole["content"][index]["input"] = json.loads(text)
        except ValueError:
            whole["content"][index]["input"] = {"__unparsedToolInput": {"raw": text, "len": len(text)}}
    return whole
