"""Which URL belongs to which dialect, with the session key as header, query or prefix `/s/KEY`.

| route | dialect |
|---|---|
| POST /v1/chat/completions | chat |
| GET /v1/models, /v1/models/NAME | chat |
"""

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar.core.dialects.base import Dialect
from polar.core.dialects.chat import ChatDialect
from polar.gateway.proxy import Endpoint, ModelProxy, Scope, authenticate
from polar.settings import GatewaySettings

_CHAT = ChatDialect()


def dialect_of(scope: Scope) -> Dialect:
    """The dialect whose client this is, for what all dialects have: model lists and wrong URLs."""
    del scope
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

    routes = []
    for prefix in ("", "/s/{key}"):
        routes += [
            Route(f"{prefix}/v1/chat/completions", Endpoint(_CHAT, proxy.sample), methods=["POST"]),
            Route(f"{prefix}/v1/models", models, methods=["GET"]),
            Route(f"{prefix}/v1/models/{{name:path}}", models, methods=["GET"]),
        ]
    return routes
