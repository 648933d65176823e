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

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar.core.dialects.base import Dialect
from polar.core.dialects.chat import ChatDialect
from polar.core.dialects.google import GoogleDialect
from polar.core.dialects.messages import MessagesDialect
from polar.core.dialects.responses import ResponsesDialect
from polar.gateway.proxy import Endpoint, ModelProxy, Scope, authenticate
from polar.gateway.responses import HttpError
from polar.settings import GatewaySettings

SERVED = (
    "POST /v1/chat/completions, /v1/responses, /v1/messages and /v1beta/models/NAME:generateContent, "
    "and GET /v1/models"
)
_CHAT = ChatDialect()
_RESPONSES = ResponsesDialect()
_MESSAGES = MessagesDialect()
_GOOGLE = GoogleDialect(stream=False)
_GOOGLE_STREAM = GoogleDialect(stream=True)


def dialect_of(scope: Scope) -> Dialect:
    """The dialect whose client this is, for what all dialects have: model lists and wrong URLs."""
    names = {name for name, _ in scope["headers"]}
    if b"anthropic-version" in names or "/v1/messages" in scope["path"]:
        return _MESSAGES
    if b"x-goog-api-key" in names or b"x-goog-api-client" in names or "/v1beta/" in scope["path"]:
        return _GOOGLE
    return _CHAT


def model_routes(settings: GatewaySettings, secret: bytes, proxy: ModelProxy) -> list[Route]:
    """All routes that harnesses use."""
    started = int(time.time())

    async def models(request: Request) -> Response:
        authenticate(secret, settings.id, request.scope, time.time())
        dialect = dialect_of(request.scope)
        name = request.path_params.get("name")
        body = dialect.models(settings.model, started) if name is None else dialect.model(name, started)
        return Response(body, media_type="application/json")

    calls = {
        "/v1/chat/completions": Endpoint(_CHAT, proxy.sample),
        "/v1/responses": Endpoint(_RESPONSES, proxy.sample),
        "/v1/responses/input_tokens": Endpoint(_RESPONSES, proxy.count),
        "/v1/messages": Endpoint(_MESSAGES, proxy.sample),
        "/v1/messages/count_tokens": Endpoint(_MESSAGES, proxy.count),
    }
    for version in ("v1", "v1beta"):
        model = f"/{version}/models/{{target:path}}"
        calls[f"{model}:generateContent"] = Endpoint(_GOOGLE, proxy.sample)
        calls[f"{model}:streamGenerateContent"] = Endpoint(_GOOGLE_STREAM, proxy.sample)
        calls[f"{model}:countTokens"] = Endpoint(_GOOGLE, proxy.count)
    routes = []
    for prefix in ("", "/s/{key}"):
        routes += [Route(prefix + path, endpoint, methods=["POST"]) for path, endpoint in calls.items()]
        routes += [
            Route(f"{prefix}/v1/responses", _no_websocket, methods=["GET"]),
            *(
                Route(f"{prefix}/{version}/models{name}", models, methods=["GET"])
                for version in ("v1", "v1beta")
                for name in ("", "/{name:path}")
            ),
        ]
    return routes


async def _no_websocket(_: Request) -> Response:
    raise HttpError(426, "responses are streamed by POST", kind="invalid_request_error", code="no_websocket")
