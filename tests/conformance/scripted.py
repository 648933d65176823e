"""What the engine says, in vLLM's words: reasoning, text and tool calls, streamed and whole."""

import json
from dataclasses import dataclass, field
from typing import Any

from schemas.calls import CallRecord
from tests.unit.gateway.fake_engine import Answer, Connection, FakeEngine
from tests.unit.gateway.running import RunningGateway, eventually


@dataclass
class Say:
    """One answer of the model."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """(name, arguments as text)."""
    finish: str = ""
    stop_reason: str | None = None

    @property
    def finish_reason(self) -> str:
        return self.finish or ("tool_calls" if self.calls else "stop")

    def tool_calls(self) -> list[dict[str, Any]]:
        return [
            {"id": f"call-{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(self.calls)
        ]

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        return message | ({"tool_calls": self.tool_calls()} if self.calls else {})

    def deltas(self) -> list[dict[str, Any]]:
        """Cut small, as an engine does: text by three characters, arguments by five."""
        out: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        out += [{"reasoning": part} for part in cut(self.reasoning, 3)]
        out += [{"content": part} for part in cut(self.text, 3)]
        for index, call in enumerate(self.tool_calls()):
            function = call["function"]
            out.append({"tool_calls": [call | {"index": index, "function": function | {"arguments": ""}}]})
            out += [
                {"tool_calls": [{"index": index, "function": {"arguments": part}}]}
                for part in cut(function["arguments"], 5)
            ]
        return out


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


PROMPT = [1, 2, 3, 4]


def chunk(choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-abc", "object": "chat.completion.chunk", "created": 1700000000, "model": "policy",
        "choices": [] if choice is None else [choice], **more,
    }  # fmt: skip


def sampled(token: int) -> dict[str, Any]:
    logprob = {"token": f"token_id:{token}", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    return {"token_ids": [token], "logprobs": {"content": [logprob]}}


def stream_of(says: list[Say]) -> list[Any]:
    """The events of a stream in which each choice says one thing, and their ids."""
    events: list[Any] = []
    tokens = 0
    for index, say in enumerate(says):
        deltas = [*say.deltas(), {}]
        for position, delta in enumerate(deltas):
            last = position == len(deltas) - 1
            more = {"prompt_token_ids": PROMPT} if not events else {}
            choice = {
                "index": index, "delta": delta, "finish_reason": say.finish_reason if last else None,
                "stop_reason": say.stop_reason if last else None, **sampled(position + 10),
            }  # fmt: skip
            events.append(chunk(choice, **more))
            tokens += 1
    return [*events, chunk(None, usage=usage(tokens)), "[DONE]"]


def usage(tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": len(PROMPT), "completion_tokens": tokens, "total_tokens": len(PROMPT) + tokens,
        "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip


def whole_of(says: list[Say]) -> dict[str, Any]:
    choices = [
        {
            "index": index, "message": say.message(), "finish_reason": say.finish_reason,
            "stop_reason": say.stop_reason, **sampled(10),
        }
        for index, say in enumerate(says)
    ]  # fmt: skip
    return {
        "id": "chatcmpl-abc", "object": "chat.completion", "created": 1700000000, "model": "policy",
        "choices": choices, "prompt_token_ids": PROMPT, "usage": usage(len(says)),
    }  # fmt: skip


@dataclass
class Scripted:
    """The engine, the gateway before it, and a key for a session."""

    engine: FakeEngine
    gateway: RunningGateway
    key: str

    @property
    def url(self) -> str:
        return self.gateway.url

    def say(self, *says: Say) -> None:
        """What every call gets from now on."""

        async def talk(connection: Connection, body: dict[str, Any]) -> None:
            if not body.get("stream"):
                await connection.json(whole_of(list(says)))
                return
            await connection.head(200, "text/event-stream", None)
            for event in stream_of(list(says)):
                await connection.event(event.encode() if isinstance(event, str) else event)
            await connection.end_chunks()

        self.engine.talk = talk

    def refuse(self, status: int, message: str, **headers: str) -> None:
        self.engine.script = [Answer(status, json={"error": {"message": message}}, headers=headers)]

    def break_off(self, say: Say, after: int) -> None:
        """The next stream is cut after so many events."""
        events = stream_of([say])[:after]
        writes = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
        self.engine.script = [Answer(writes=writes, end="reset")]

    @property
    def sent(self) -> dict[str, Any]:
        """Body of the engine's last call."""
        return self.engine.requests[-1]

    async def record(self) -> CallRecord:
        """The last call's record."""
        await eventually(self.gateway.log.calls)
        return self.gateway.log.calls()[-1]
