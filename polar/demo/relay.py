"""A relay between gateway and engine that keeps every raw engine answer on disk.

    python -m polar.demo.relay --port P --engine URL [--file DATA_DIR/audit/answers.jsonl]

It is the independent witness of the demo's ledgers: it shares no code with the gateway and
believes nothing of it. Invariant: the raw answer is on disk (appended and synced) before its end
is forwarded, so whatever a gateway recorded or a harness received is there, even after kill -9.
Everything but generation passes through unrecorded; streams are passed on chunk by chunk.

The file holds one JSON object a line: an answer (see `Answer` in polar.demo.witness), or
`{"forwarded": n}` once the end of answer n was handed to the client's connection.
"""

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from polar.settings import LogSettings

GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/inference/v1/generate"})
_HOP_HEADERS = frozenset(
    {"host", "connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length",
     "accept-encoding", "content-encoding", "server", "date"}
)  # fmt: skip
_END_MARKS = (b'"finish_reason":"', b"data: [DONE]")
"""From the first of these on, chunks of a stream are held until the answer is on disk. Inside a
text the quotes would be escaped, so no content looks like them."""


class AnswerFile:
    """Append-only JSON lines; a line torn by kill -9 is closed off at the next start."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")
        self._number = time.time_ns()
        self._lock = asyncio.Lock()

    def next_number(self) -> int:
        """A number that no other answer of this file has."""
        self._number += 1
        return self._number

    async def append(self, value: dict[str, Any], *, sync: bool = True) -> None:
        """On disk when this returns (with `sync`)."""
        line = json.dumps(value, ensure_ascii=False).encode() + b"\n"
        async with self._lock:
            await asyncio.to_thread(self._write, line, sync)

    def _write(self, line: bytes, sync: bool) -> None:  # noqa: FBT001
        view = memoryview(line)
        while view:
            view = view[os.write(self._file, view) :]
        if sync:
            os.fsync(self._file)


class Relay:
    """Forwards requests to one engine."""

    def __init__(self, engine: str, answers: AnswerFile) -> None:
        self._engine = engine.rstrip("/")
        self._answers = answers
        self._client: aiohttp.ClientSession | None = None

    async def open(self, _app: web.Application) -> None:
        """Called by aiohttp at start."""
        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def close(self, _app: web.Application) -> None:
        """Called by aiohttp at the end."""
        if self._client is not None:
            await self._client.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward one request; an engine that is down is 502."""
        client = self._client
        if client is None:
            return web.json_response({"error": {"message": "relay is ending"}}, status=503)
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
        headers["Accept-Encoding"] = "identity"
        recorded = request.method == "POST" and request.path in GENERATION_PATHS
        record = _new_record(request, self._answers.next_number()) if recorded else None
        received = bytearray()
        try:
            async with client.request(
                request.method, self._engine + request.path_qs, data=body, headers=headers
            ) as upstream:
                return await self._forward(request, upstream, record, received)
        except aiohttp.ClientConnectorError as error:
            return web.json_response({"error": {"message": str(error), "type": "engine_down"}}, status=502)
        finally:
            # Broken off on either side: what came so far is kept, as incomplete.
            if record is not None and received and "body" not in record:
                await asyncio.shield(self._answers.append({**record, "complete": False, **_body(received)}))

    async def _forward(
        self,
        request: web.Request,
        upstream: aiohttp.ClientResponse,
        record: dict[str, Any] | None,
        received: bytearray,
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
        for name, value in upstream.headers.items():
            if name.lower() not in _HOP_HEADERS:
                response.headers.add(name, value)
        if record is not None:
            record["status"] = upstream.status
        is_stream = "text/event-stream" in upstream.headers.get("Content-Type", "")
        if is_stream or record is None:
            await response.prepare(request)
        held = bytearray()
        async for chunk in upstream.content.iter_any():
            if record is None:
                await response.write(chunk)
                continue
            received += chunk
            # A mark may be cut in two by the chunks, so look a little back.
            recent = bytes(received[-len(chunk) - 32 :])
            if held or not is_stream or any(mark in recent for mark in _END_MARKS):
                held += chunk
            else:
                await response.write(chunk)
        if record is None:
            await response.write_eof()
            return response
        record.update(complete=True, **_body(received))
        await self._answers.append(record)
        if not response.prepared:
            await response.prepare(request)
        await response.write(bytes(held))
        await response.write_eof()
        await self._answers.append({"forwarded": record["n"]}, sync=False)
        return response


def _new_record(request: web.Request, number: int) -> dict[str, Any]:
    return {
        "n": number,
        "at": time.time(),
        "path": request.path,
        "purpose": request.headers.get("X-Polar-Purpose", ""),
        "call": request.headers.get("X-Polar-Call", ""),
        "status": 0,
    }


def _body(received: bytearray) -> dict[str, str]:
    return {"body": received.decode("utf-8", errors="replace")}


def make_app(engine: str, file: Path) -> web.Application:
    """The relay as an aiohttp application."""
    app = web.Application(client_max_size=64 << 20)

    async def start(app: web.Application) -> None:
        relay = Relay(engine, AnswerFile(file))
        await relay.open(app)
        app[_RELAY] = relay

    async def stop(app: web.Application) -> None:
        await app[_RELAY].close(app)

    async def handle(request: web.Request) -> web.StreamResponse:
        return await app[_RELAY].handle(request)

    app.on_startup.append(start)
    app.on_cleanup.append(stop)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


_RELAY = web.AppKey("relay", Relay)


def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m polar.demo.relay", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", required=True, help="base URL of the engine, without /v1")
    parser.add_argument("--file", type=Path, default=None, help="default: POLAR_DATA_DIR/audit/answers.jsonl")
    options = parser.parse_args()
    file = options.file or LogSettings().data_dir / "audit" / "answers.jsonl"
    web.run_app(
        make_app(options.engine, file),
        host="127.0.0.1",
        port=options.port,
        handler_cancellation=True,
        access_log=None,
        print=None,
    )


if __name__ == "__main__":
    main()
