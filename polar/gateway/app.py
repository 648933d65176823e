"""The gateway's HTTP surface and its process.

| route | for |
|---|---|
| model calls, model lists, token counts (polar.gateway.routes) | harnesses |
| /admin/… | nodes, weight-sync (polar.gateway.admin) |
| GET /health, /ready | supervisors: the process lives; it can serve (503 with the reason else) |

A session key may be part of a URL, so no access log is written and no error repeats a path.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from polar.errors import SettingsError
from polar.gateway import garbage
from polar.gateway.admin import admin_routes
from polar.gateway.http_protocol import BoundedHeadProtocol
from polar.gateway.parts import Parts, running_parts
from polar.gateway.responses import HttpError, internal_error
from polar.gateway.routes import CallRoutes, dialect_of, list_routes, wrong_url
from polar.gateway.sender import WriterFactory
from polar.kafka.writer import LogWriter
from polar.secret import load_secret
from polar.settings import GatewaySettings, LogSettings
from polar.telemetry.metrics import expose

logger = logging.getLogger(__name__)


def create_app(parts: Parts, secret: bytes) -> ASGIApp:
    """The ASGI application over running parts."""

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "alive", "gateway_id": parts.settings.id})

    async def ready(_: Request) -> Response:
        trouble = parts.trouble
        if trouble is None:
            return JSONResponse({"ready": True})
        return JSONResponse({"ready": False, "reason": trouble[0], "detail": trouble[1]}, status_code=503)

    routes = list_routes(parts.settings, secret)
    routes += admin_routes(parts, secret)
    routes += [Route("/health", health), Route("/ready", ready)]
    app = Starlette(
        routes=routes,
        exception_handlers={HttpError: _http_error, HTTPException: _no_route, Exception: _fault},
    )
    app.router.redirect_slashes = False
    return CallRoutes(parts.proxy, app)


async def serve(
    log: LogSettings, settings: GatewaySettings, *, new_writer: WriterFactory | None = None
) -> None:
    """Run the gateway until SIGTERM or SIGINT. Raises SettingsError.

    At the signal no request is accepted any more, calls in flight may end within
    `shutdown_wait_seconds`, and the spool is flushed. When a part of it fails the gateway stops
    in the same way and raises: its supervisor starts it again, and the spool holds the rest.
    """
    secret = load_secret(log)
    listener = _listen(settings)
    async with running_parts(log, settings, secret, new_writer or (lambda: LogWriter(log))) as parts:
        server = _Server(server_config(parts, secret))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        garbage.calm()
        expose(parts.metrics)
        logger.info("gateway %s serves %s", settings.id, parts.url)
        with _stopped_by_signals(server):
            await asyncio.wait({serving, *parts.background}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            await serving
        for task in parts.background:
            if task.done():
                task.result()


@asynccontextmanager
async def serving_until_left(parts: Parts, secret: bytes, listener: socket.socket) -> AsyncIterator[None]:
    """Serve on a socket while the block runs; signals are somebody else's."""
    server = _Server(server_config(parts, secret))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


def server_config(parts: Parts, secret: bytes) -> uvicorn.Config:
    """How the gateway speaks HTTP: heads are bounded, nothing is logged of a request."""
    return uvicorn.Config(
        create_app(parts, secret),
        http=BoundedHeadProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=max(1, int(parts.settings.shutdown_wait_seconds)),
        timeout_keep_alive=75,
    )


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process before the spool is flushed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _stopped_by_signals(server: uvicorn.Server) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        # A second signal cancels what is in flight.
        server.force_exit = server.should_exit
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _listen(settings: GatewaySettings) -> socket.socket:
    try:
        return socket.create_server((settings.host, settings.port), backlog=2048)
    except OSError as error:
        raise SettingsError(
            f"gateway: cannot listen on {settings.host}:{settings.port} ({error.strerror}); "
            "set POLAR_GATEWAY_PORT to a free port"
        ) from error


def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HttpError):
        raise error
    body = dialect_of(request.scope).error(error.api)
    return Response(body, error.api.status, {k.decode(): v.decode() for k, v in error.headers})


def _no_route(request: Request, error: Exception) -> Response:
    return _http_error(request, wrong_url(error.status_code if isinstance(error, HTTPException) else 404))


def _fault(request: Request, error: Exception) -> Response:
    logger.error("a request failed inside the gateway", exc_info=error)
    return _http_error(request, internal_error(error))
