"""Which URL belongs to which dialect, with the session key in a header, the query or as `/s/KEY`.

| route | for |
|---|---|
| POST /v1/chat/completions | OpenAI Chat Completions |
| POST /v1/responses, /v1/responses/input_tokens | OpenAI Responses |
| POST /v1/messages, /v1/messages/count_tokens | Anthropic Messages |
| POST /v1beta/models/NAME:generateContent, :streamGenerateContent, :countTokens | Google |
| GET /v1/models, /v1/models/NAME | all |

Google's clients differ in the version: /v1 and /v1beta mean the same for them.

GET /v1/responses is how Codex asks for a WebSocket: 426 makes it use POST.
"""

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from polar.core.dialects.base import Dialect
from polar.core.dialects.chat import ChatDialect
from polar.core.dialects.google import GoogleDialect
from polar.core.dialects.messages import MessagesDialect
from polar.core.dialects.responses import ResponsesDialect
from polar.gateway.proxy import ModelProxy, Request, Scope, authenticate
from polar.gateway.responses import HttpError, Receive, Send, internal_error, send_error
from polar.settings import GatewaySettings

logger = logging.getLogger(__name__)

Serve = Callable[[Dialect, Request, Receive, Send], Awaitable[None]]

_SERVED = (
    "POST /v1/chat/completions, /v1/responses, /v1/messages and /v1beta/models/NAME:generateContent, "
    "and GET /v1/models"
)
_CHAT = ChatDialect()
_RESPONSES = ResponsesDialect()
_MESSAGES = MessagesDialect()
_GOOGLE = GoogleDialect(stream=False)
_GOOGLE_STREAM = GoogleDialect(stream=True)
_KEY_PREFIX = "/s/"
_WEBSOCKET = "/v1/responses"
_GOOGLE_PREFIXES = ("/v1/models/", "/v1beta/models/")


def dialect_of(scope: Scope) -> Dialect:
    """The dialect whose client this is, for what all dialects have: model lists and wrong URLs."""
    names = {name for name, _ in scope["headers"]}
    if b"anthropic-version" in names or "/v1/messages" in scope["path"]:
        return _MESSAGES
    if b"x-goog-api-key" in names or b"x-goog-api-client" in names or "/v1beta/" in scope["path"]:
        return _GOOGLE
    return _CHAT


class CallRoutes:
    """The ASGI application: calls of models at once, everything else by another application.

    A call is what a gateway does all day; to match it against every route costs as much as to parse it.
    """

    def __init__(self, proxy: ModelProxy, others: ASGIApp) -> None:
        self._others = others
        self._exact: dict[str, tuple[Dialect, Serve]] = {
            "/v1/chat/completions": (_CHAT, proxy.sample),
            "/v1/responses": (_RESPONSES, proxy.sample),
            "/v1/responses/input_tokens": (_RESPONSES, proxy.count),
            "/v1/messages": (_MESSAGES, proxy.sample),
            "/v1/messages/count_tokens": (_MESSAGES, proxy.count),
        }
        self._verbs: dict[str, tuple[Dialect, Serve]] = {
            "generateContent": (_GOOGLE, proxy.sample),
            "streamGenerateContent": (_GOOGLE_STREAM, proxy.sample),
            "countTokens": (_GOOGLE, proxy.count),
        }

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope.get("path", "")
        key = ""
        if path.startswith(_KEY_PREFIX):
            key, slash, rest = path[len(_KEY_PREFIX) :].partition("/")
            path = slash + rest
        found, target = self._exact.get(path), ""
        if found is None and path.startswith(_GOOGLE_PREFIXES):
            target, _, verb = path.partition("/models/")[2].rpartition(":")
            found = self._verbs.get(verb) if target else None
        if found is None or scope["type"] != "http" or (scope["method"], path) == ("GET", _WEBSOCKET):
            await self._others(scope, receive, send)
            return
        dialect, serve = found
        if scope["method"] != "POST":
            await send_error(send, wrong_url(405), dialect)
            return
        try:
            await serve(dialect, Request(scope, key, target), receive, send)
        except Exception as error:
            logger.exception("a request failed inside the gateway")
            # Where the head was sent already, the server closes the connection.
            await send_error(send, internal_error(error), dialect)


def list_routes(settings: GatewaySettings, secret: bytes) -> list[Route]:
    """The other routes that harnesses use."""
    started = int(time.time())

    async def models(request: StarletteRequest) -> Response:
        asked = Request(request.scope, request.path_params.get("key", ""))
        authenticate(secret, settings.id, asked, time.time())
        dialect = dialect_of(request.scope)
        name = request.path_params.get("name")
        body = dialect.models(settings.model, started) if name is None else dialect.model(name, started)
        return Response(body, media_type="application/json")

    routes = []
    for prefix in ("", "/s/{key}"):
        routes += [
            Route(f"{prefix}{_WEBSOCKET}", _no_websocket, methods=["GET"]),
            *(
                Route(f"{prefix}/{version}/models{name}", models, methods=["GET"])
                for version in ("v1", "v1beta")
                for name in ("", "/{name:path}")
            ),
        ]
    return routes


def wrong_url(status: int) -> HttpError:
    """404 or 405."""
    return HttpError(
        status,
        f"this gateway serves {_SERVED} (also under /s/KEY)",
        kind="invalid_request_error",
        code="unknown_url" if status == 404 else "method_not_allowed",
    )


async def _no_websocket(_: StarletteRequest) -> Response:
    raise HttpError(426, "responses are streamed by POST", kind="invalid_request_error", code="no_websocket")
