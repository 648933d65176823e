"""An engine that speaks vLLM's chat form on a raw socket, so that tests decide about every byte.

Tokens are bytes: a message is a role token, its UTF-8 bytes and a closing token, so that a
prompt that repeats an answer continues its ids exactly.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

ROLES = {"system": 300, "user": 301, "assistant": 302, "tool": 303}
CLOSE = 399
_BASE_LOGITS = {"token_id:65": 2.0, "token_id:66": 1.5, "token_id:67": 0.5, "token_id:68": 0.0}
_REST = 50.0


@dataclass
class Answer:
    """One scripted answer; `status` 0 closes the connection before any byte."""

    status: int = 200
    delay_s: float = 0.0
    json: Any = None
    raw: str | None = None
    writes: list[bytes] | None = None
    end: str = "close"
    headers: dict[str, str] = field(default_factory=dict)


Talk = Callable[["Connection", dict[str, Any]], Awaitable[None]]


class Connection:
    """A client of the engine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def head(self, status: int, content_type: str, length: int | None, **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {content_type}"]
        lines.append("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        await self.writer.drain()

    async def json(self, body: Any, status: int = 200, **headers: str) -> None:
        data = json.dumps(body, separators=(",", ":")).encode()  # as vLLM writes
        await self.head(status, "application/json", len(data), **headers)
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()

    async def event(self, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()
        await self.chunk(b"data: " + data + b"\n\n")

    async def end_chunks(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def reset(self) -> None:
        self.writer.transport.abort()

    async def until_closed(self) -> None:
        """Wait until the peer leaves."""
        while await self.reader.read(65536):
            pass


class FakeEngine:
    """See the module; `script` holds answers to be given first, `talk` replaces the default answer."""

    def __init__(self) -> None:
        self.models = ["policy"]
        self.max_model_len = 4096
        self.weight_version = "default"
        self.processed_logprobs = True
        self.default_temperature = 1.0
        self.complete_ids = True
        self.takes_ids = True
        """Prompts may come as ids."""
        self.begins_with: int | None = None
        """A token in front of every prompt that the engine renders itself."""
        self.text = "ok"
        self.token_seconds = 0.0
        """Time between the chunks of a stream, and before an unstreamed answer."""
        self.requests: list[dict[str, Any]] = []
        """Bodies of chat calls, without probes."""
        self.headers: list[dict[str, str]] = []
        self.counted: list[dict[str, Any]] = []
        """Bodies of questions for the number of tokens."""
        self.probed: list[dict[str, Any]] = []
        """Bodies of probes."""
        self.closed_early = 0
        """Calls whose client left before the end."""
        self.script: list[Answer] = []
        self.talk: Talk | None = None
        self.url = ""
        self.stop: Callable[[], Awaitable[None]]
        """Close the socket and all connections, as the end of its process would."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode().split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = {
                    k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._route(connection, method, path, headers, body)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _route(
        self, connection: Connection, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        if (method, path) == ("GET", "/health"):
            await connection.json({})
        elif (method, path) == ("GET", "/v1/models"):
            await connection.json(
                {"data": [{"id": model, "max_model_len": self.max_model_len} for model in self.models]}
            )
        elif (method, path) == ("GET", "/weight_info"):
            await connection.json({"weight_version": self.weight_version})
        elif (method, path) == ("POST", "/v1/chat/completions"):
            await self._chat(connection, json.loads(body), headers)
        elif (method, path) == ("POST", "/tokenize"):
            self.counted.append(json.loads(body))
            await connection.json({"count": 2 + len(self.counted[-1]["messages"]), "tokens": []})
        else:
            await connection.json({"detail": "Not Found"}, 404)

    async def _chat(self, connection: Connection, body: dict[str, Any], headers: dict[str, str]) -> None:
        if headers.get("x-polar-purpose") == "probe":
            self.probed.append(body)
            await connection.json(self.answer(body))
            return
        self.requests.append(body)
        self.headers.append(headers)
        if self.script:
            try:
                await self._play(connection, self.script.pop(0))
            except ConnectionError:
                self.closed_early += 1
                raise
        elif self.talk is not None:
            await self.talk(connection, body)
        elif body.get("stream"):
            await connection.head(200, "text/event-stream", None)
            for chunk in self.chunks(body):
                await connection.event(chunk)
                await asyncio.sleep(self.token_seconds)
            await connection.end_chunks()
        else:
            answer = self.answer(body)
            await asyncio.sleep(self.token_seconds)
            await connection.json(answer)

    async def _play(self, connection: Connection, answer: Answer) -> None:
        if answer.delay_s:
            left = asyncio.ensure_future(connection.until_closed())
            await asyncio.wait({left}, timeout=answer.delay_s)
            if left.done():
                self.closed_early += 1
                connection.reset()
                return
            left.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await left
        if answer.status == 0:
            connection.reset()
            return
        if answer.writes is not None:
            await connection.head(answer.status, "text/event-stream", None, **answer.headers)
            for data in answer.writes:
                await connection.chunk(data)
                await asyncio.sleep(0.001)
        elif answer.raw is not None:
            data = answer.raw.encode()
            await connection.head(answer.status, "application/json", len(data), **answer.headers)
            connection.writer.write(data)
        else:
            await connection.json(answer.json, answer.status, **answer.headers)
        if answer.end == "reset":
            await asyncio.sleep(0.02)
            connection.reset()
        elif answer.end == "hang":
            await connection.until_closed()
            self.closed_early += 1
        elif answer.writes is not None:
            await connection.end_chunks()

    # -- the default answer ---------------------------------------------------------------

    def prompt_ids(self, body: dict[str, Any]) -> list[int]:
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if given and self.takes_ids:
            return list(given)
        ids: list[int] = [] if self.begins_with is None else [self.begins_with]
        for message in body["messages"]:
            ids += [ROLES.get(message["role"], 304), *str(message.get("content") or "").encode(), CLOSE]
        return [*ids, ROLES["assistant"]]

    def sampled(self) -> tuple[list[int], list[dict[str, Any]]]:
        ids = [*self.text.encode(), CLOSE]
        logprobs = [{"token": f"token_id:{token}", "logprob": -0.25 * (i + 1)} for i, token in enumerate(ids)]
        return ids, logprobs

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, logprobs = self.sampled()
        if body.get("top_logprobs"):
            logprobs[0]["top_logprobs"] = self._top_logprobs(body)
        prompt = self.prompt_ids(body)
        count = body.get("n") or 1
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": self.text},
                "logprobs": {"content": logprobs},
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": ids if self.complete_ids else None,
            }
            for index in range(count)
        ]
        return {
            "id": f"chatcmpl-{len(self.requests)}",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": choices,
            "prompt_token_ids": prompt,
            "usage": self.usage(len(prompt), count * len(ids)),
        }

    def chunks(self, body: dict[str, Any]) -> list[Any]:
        """Events of the streamed default answer."""
        ids, logprobs = self.sampled()
        prompt = self.prompt_ids(body)

        def chunk(choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
            return {
                "id": f"chatcmpl-{len(self.requests)}",
                "object": "chat.completion.chunk",
                "created": 1,
                "model": body["model"],
                "choices": [] if choice is None else [choice],
                **more,
            }

        events: list[Any] = []
        count = body.get("n") or 1
        for index in range(count):
            head = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            events.append(chunk(head, prompt_token_ids=prompt))
        for position, token in enumerate(ids):
            for index in range(count):
                last = position == len(ids) - 1
                choice = {
                    "index": index,
                    "delta": {} if last else {"content": chr(token)},
                    "logprobs": {"content": [logprobs[position]]},
                    "finish_reason": "stop" if last else None,
                    "token_ids": [token],
                }
                events.append(chunk(choice))
        events.append(chunk(None, usage=self.usage(len(prompt), count * len(ids))))
        return [*events, b"[DONE]"]

    @staticmethod
    def usage(prompt: int, completion: int) -> dict[str, int]:
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _top_logprobs(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        temperature = body.get("temperature", self.default_temperature) if self.processed_logprobs else 1.0
        scaled = {token: logit / temperature for token, logit in _BASE_LOGITS.items()}
        total = math.log(sum(map(math.exp, scaled.values())) + _REST)
        return [{"token": token, "logprob": value - total} for token, value in scaled.items()]


@asynccontextmanager
async def running_engine(port: int = 0) -> AsyncIterator[FakeEngine]:
    """An engine on a free port (or on this one)."""
    engine = FakeEngine()
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(engine.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def stop() -> None:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    engine.stop = stop
    try:
        yield engine
    finally:
        await stop()
        await server.wait_closed()
