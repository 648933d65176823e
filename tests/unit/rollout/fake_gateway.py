"""A gateway's admin surface on a loopback port, and a writer that keeps events in a list."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polar.core.stage import Emit, Partition
from polar.errors import LogUnavailableError
from schemas.base import Event


class FakeGateway:
    """Opens and seals what it is asked to; `failures` answers 503 so many times first."""

    def __init__(self) -> None:
        self.opened: dict[str, dict[str, Any]] = {}
        self.sealed: dict[str, dict[str, Any]] = {}
        self.authorizations: set[str] = set()
        self.failures = 0
        self.refusal: Response | None = None
        self.url = ""

    async def _answer(self, request: Request) -> Response:
        self.authorizations.add(request.headers["authorization"])
        if self.failures > 0:
            self.failures -= 1
            return JSONResponse({"error": "not yet"}, status_code=503)
        if self.refusal is not None:
            return self.refusal
        body = await request.json()
        if request.url.path.endswith("/open"):
            self.opened[body["session_id"]] = body
            return JSONResponse({"opened": True})
        self.sealed[body["session_id"]] = body
        return JSONResponse({"calls": 3})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["FakeGateway"]:
        app = Starlette(
            routes=[
                Route("/admin/sessions/open", self._answer, methods=["POST"]),
                Route("/admin/sessions/seal", self._answer, methods=["POST"]),
            ]
        )
        with socket.create_server(("127.0.0.1", 0)) as server_socket:
            port = server_socket.getsockname()[1]
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
            serving = asyncio.create_task(server.serve(sockets=[server_socket]))
            while not server.started:  # noqa: ASYNC110  (uvicorn sends no signal)
                await asyncio.sleep(0.005)
            self.url = f"http://127.0.0.1:{port}"
            try:
                yield self
            finally:
                server.should_exit = True
                await serving


def closed_port_url() -> str:
    """A loopback URL where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


class ListWriter:
    """Keeps what is written; `outages` times a write fails first."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.outages = 0
        self.has_news = asyncio.Event()

    async def write_many(self, events: Sequence[Emit]) -> list[tuple[Partition, int]]:
        if self.outages > 0:
            self.outages -= 1
            raise LogUnavailableError("the broker is away")
        self.events += [emit.event for emit in events]
        self.has_news.set()
        return []

    async def wait_for(self, kind: type[Event], *, count: int = 1, seconds: float = 15.0) -> list[Any]:
        """The events of a kind, once there are so many."""
        async with asyncio.timeout(seconds):
            while len(found := [event for event in self.events if isinstance(event, kind)]) < count:
                self.has_news.clear()
                await self.has_news.wait()
        return found
