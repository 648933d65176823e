"""What is asked of the gateways: one long text as tokens, and chat requests cut from it.

The text is this repository's own sources. Tokens are its words, spaces and signs; an id is a checksum of
its token, so ids repeat as often as words do in text, which is what compression sees of a real tokenizer.
"""

import json
import re
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.record import ROOT

MODEL = "policy"
VOCABULARY = 151_643
_TOKEN = re.compile(r" ?[A-Za-z]+|\d{1,3}|\n[ ]*|[ ]+|[^\w\s]+|_+|\S")
_NUM_TOOLS = 14


@dataclass(frozen=True, slots=True)
class Load:
    """One size of call."""

    request_kb: int
    prompt: int
    """Prompt ids."""
    sampled: int
    """Sampled ids."""


LOADS = {"5k": Load(42, 5_000, 200), "20k": Load(80, 20_000, 500), "50k": Load(500, 50_000, 1_000)}


@cache
def tokens() -> tuple[str, ...]:
    """The text, token by token; at least 65,000 of them."""
    sources = sorted((ROOT / "polar").rglob("*.py")) + sorted((ROOT / "tests").rglob("*.py"))
    found: list[str] = []
    for path in sources:
        found += _TOKEN.findall(path.read_text())
        if len(found) > 80_000:
            break
    return tuple(found)


def ids(begin: int, end: int) -> list[int]:
    """The ids of tokens [begin, end)."""
    return [zlib.crc32(token.encode()) % VOCABULARY for token in tokens()[begin:end]]


def write_stream(path: Path) -> None:
    """The token stream as the mock engine reads it: id, text inside a JSON string, bytes, by tabs."""
    everything = zip(ids(0, len(tokens())), tokens(), strict=True)
    path.write_text(
        "".join(
            [
                f"{number}\t{json.dumps(token)[1:-1]}\t{','.join(map(str, token.encode()))}\n"
                for number, token in everything
            ]
        )
    )


def text(begin: int, end: int) -> str:
    """The text of tokens [begin, end)."""
    return "".join(tokens()[begin:end])


def mark(prompt: int, sampled: int, *, wait_ms: int = 0, gap_ms: int = 0) -> str:
    """What a request says to the mock engine."""
    return f"[[prompt={prompt} sampled={sampled} wait_ms={wait_ms} gap_ms={gap_ms}]]"


def tools() -> list[dict[str, Any]]:
    """Tool definitions as a coding agent sends them, about 10 KB."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": text(number * 90, number * 90 + 90),
                "parameters": {
                    "type": "object",
                    "properties": {
                        "path": {"type": "string", "description": "Absolute path of the file to work on."},
                        "pattern": {"type": "string", "description": "Regular expression to look for."},
                        "limit": {"type": "integer", "minimum": 1, "maximum": 2000},
                    },
                    "required": ["path"],
                },
            },
        }
        for number in range(_NUM_TOOLS)
    ]


def first_request(
    load: Load, *, stream: bool = False, wait_ms: int = 0, gap_ms: int = 0, model: str = MODEL
) -> bytes:
    """A first call: system prompt, tools, some turns, filled up to the load's size."""
    wish = mark(load.prompt, load.sampled, wait_ms=wait_ms, gap_ms=gap_ms)
    ending = {"role": "user", "content": f"Go on. {wish}"}
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(0, 1500)}]
    body = {"model": model, "messages": messages, "tools": tools(), "stream": stream, "max_tokens": 4096}
    at, number = 1500, 0
    missing = load.request_kb * 1000 - len(dump(body)) - len(dump(ending))
    while missing > 400:
        piece = text(at, at + 600)[: missing - 300]
        number += 1
        turn = [
            {"role": "assistant", "content": None, "tool_calls": [_tool_call(number)]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": piece},
        ]
        messages += turn
        at = (at + 600) % 60_000
        missing -= len(dump(turn))
    messages.append(ending)
    return dump(body)


def unlike(body: bytes, number: int) -> bytes:
    """A request of nearly the same size in which every message is another one."""
    body = body.replace(b'"content":"', b'"content":"%06d ' % number)
    return body.replace(b"/repo/src/", b"/r%06d/" % number)


def continuing_request(load: Load) -> bytes:
    """The call behind `first_request` of the same load: the answer, and a tool result of 100 tokens."""
    body = json.loads(first_request(load))
    body["messages"] += [
        {"role": "assistant", "content": text(load.prompt, load.prompt + load.sampled)},
        {"role": "user", "content": text(0, 100)},
    ]
    return dump(body)


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """A session that grows call by call."""

    calls: int = 60
    first_prompt: int = 5_000
    last_prompt: int = 60_000
    sampled: int = 200

    def prompt(self, call: int) -> int:
        """Prompt ids of a call, counted from 0."""
        return self.first_prompt + (self.last_prompt - self.first_prompt) * call // (self.calls - 1)

    def first_messages(self) -> list[dict[str, Any]]:
        """What the session begins with."""
        return [
            {"role": "system", "content": text(0, 1500)},
            {
                "role": "user",
                "content": text(1500, self.first_prompt) + mark(self.first_prompt, self.sampled),
            },
        ]

    def next_message(self, call: int) -> dict[str, Any]:
        """What the harness adds after the answer to a call."""
        begin, end = self.prompt(call) + self.sampled, self.prompt(call + 1)
        return {"role": "user", "content": text(begin, end) + mark(end, self.sampled)}

    def body(self, messages: list[dict[str, Any]]) -> bytes:
        """A call of the session."""
        return dump({"model": MODEL, "messages": messages, "tools": tools()[:4]})


def _tool_call(number: int) -> dict[str, Any]:
    arguments = json.dumps({"path": f"/repo/src/module_{number}.py", "limit": 200})
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "tool_1", "arguments": arguments},
    }


def in_dialect(name: str, body: bytes) -> tuple[str, bytes]:
    """(path, body) of a chat request as a client of another dialect sends it."""
    chat = json.loads(body)
    system, turns = chat["messages"][0]["content"], chat["messages"][1:]
    functions = [tool["function"] for tool in chat["tools"]]
    if name == "chat":
        return "/v1/chat/completions", body
    if name == "responses":
        asked = {"model": MODEL, "instructions": system, "input": [], "store": False}
        asked["tools"] = [{"type": "function", **function} for function in functions]
        for turn in turns:
            asked["input"] += _response_items(turn)
        return "/v1/responses", dump(asked)
    if name == "messages":
        asked = {"model": MODEL, "max_tokens": 4096, "system": [{"type": "text", "text": system}]}
        asked["tools"] = [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
            for f in functions
        ]
        asked["messages"] = [_anthropic_message(turn) for turn in turns]
        return "/v1/messages", dump(asked)
    declared = [
        {"name": f["name"], "description": f["description"], "parametersJsonSchema": f["parameters"]}
        for f in functions
    ]
    asked = {
        "systemInstruction": {"parts": [{"text": system}]},
        "contents": [_google_content(turn) for turn in turns],
        "tools": [{"functionDeclarations": declared}],
    }
    return f"/v1beta/models/{MODEL}:generateContent", dump(asked)


def _response_items(turn: dict[str, Any]) -> list[dict[str, Any]]:
    if turn["role"] == "tool":
        return [{"type": "function_call_output", "call_id": turn["tool_call_id"], "output": turn["content"]}]
    if turn.get("tool_calls"):
        return [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in turn["tool_calls"]
        ]
    return [
        {
            "type": "message",
            "role": turn["role"],
            "content": [{"type": "input_text", "text": turn["content"]}],
        }
    ]


def _anthropic_message(turn: dict[str, Any]) -> dict[str, Any]:
    if turn["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": turn["tool_call_id"], "content": turn["content"]}
        return {"role": "user", "content": [result]}
    if turn.get("tool_calls"):
        uses = [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": json.loads(call["function"]["arguments"]),
            }
            for call in turn["tool_calls"]
        ]
        return {"role": "assistant", "content": uses}
    return {"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]}


def _google_content(turn: dict[str, Any]) -> dict[str, Any]:
    if turn["role"] == "tool":
        response = {"name": "tool_1", "response": {"output": turn["content"]}}
        return {"role": "user", "parts": [{"functionResponse": response}]}
    if turn.get("tool_calls"):
        calls = [
            {
                "functionCall": {
                    "name": call["function"]["name"],
                    "args": json.loads(call["function"]["arguments"]),
                }
            }
            for call in turn["tool_calls"]
        ]
        return {"role": "model", "parts": calls}
    role = "model" if turn["role"] == "assistant" else "user"
    return {"role": role, "parts": [{"text": turn["content"]}]}


def dump(value: Any) -> bytes:
    """JSON as most clients write it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
