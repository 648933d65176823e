"""HTTP answers that the gateway gives of its own: errors in the dialect's shape, never with a key in them."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import orjson

from polar.core.dialects.base import Dialect, DialectName
from polar.core.dialects.errors import CONTEXT_OVERFLOW, ApiError
from polar.gateway.http_protocol import BODY_SECONDS, Connection

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_TRY_LATER = (429, 503)
BUDGET_SPENT = "session_budget_exhausted"

JSON_TYPE = (b"content-type", b"application/json")
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class HttpError(Exception):
    """An answer with an error status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        if status in _TRY_LATER and retry_after is None:
            # Without it some harnesses never try again, and others do for ever.
            retry_after = 1
        self.api = ApiError(status, message, kind, code, param, retry_after)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer."""
        headers = [JSON_TYPE]
        if self.api.retry_after is not None:
            headers.append((b"retry-after", str(self.api.retry_after).encode()))
        if self.api.status == 408:
            headers.append((b"connection", b"close"))
        return headers


def unauthorized(message: str, code: str = "invalid_api_key") -> HttpError:
    """401."""
    return HttpError(401, message, kind="authentication_error", code=code)


def unavailable(message: str, code: str, *, retry_after: int = 2) -> HttpError:
    """503: try again."""
    return HttpError(503, message, kind="service_unavailable", code=code, retry_after=retry_after)


def internal_error(error: Exception) -> HttpError:
    """500: a defect of the gateway."""
    message = f"internal error ({type(error).__name__}); the gateway's log has more"
    return HttpError(500, message, kind="server_error", code="internal_error")


def budget_spent(message: str, dialect: DialectName) -> HttpError:
    """The status after which this dialect's harnesses end at once; others are tried again for minutes.

    Chat harnesses end on 401 (one of them repeats a 400), Codex and Claude Code repeat a 401.
    """
    if dialect == "chat":
        return unauthorized(message, BUDGET_SPENT)
    return HttpError(400, message, kind="invalid_request_error", code=BUDGET_SPENT)


def refused_by_engine(status: int, data: bytes, retry_after: str | None) -> HttpError:
    """The engine's own refusal.

    A refusal of the request keeps its status; what is the engine's own fault becomes 502 or 503.
    """
    message = _engine_message(data) or f"the engine answered {status}"
    if status == 429:
        seconds = int(retry_after) if retry_after and retry_after.isdigit() else 1
        return HttpError(
            429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after=seconds
        )
    if status in (400, 413, 422):
        lowered = message.lower()
        if any(word in lowered for word in ("context length", "model length")):
            return HttpError(
                400, message, kind="invalid_request_error", code=CONTEXT_OVERFLOW, param="messages"
            )
        return HttpError(status, message, kind="invalid_request_error")
    if status == 503:
        return unavailable(message, "engine_unavailable")
    return HttpError(
        502, f"the engine answered {status}: {message}", kind="upstream_error", code="engine_error"
    )


async def send_json(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """A whole answer."""
    length = (b"content-length", str(len(body)).encode())
    await send(
        {"type": "http.response.start", "status": status, "headers": [*(headers or [JSON_TYPE]), length]}
    )
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: HttpError, dialect: Dialect) -> None:
    """An error answer."""
    await send_json(send, error.api.status, dialect.error(error.api), error.headers)


async def read_body(
    receive: Receive, headers: Mapping[bytes, bytes], limit: int, connection: Connection
) -> bytes:
    """The request's body. Raises HttpError: 413 above `limit` bytes, 408 when its rest does not come;
    ConnectionError when the client left.

    A body that is too large is read on for a while and dropped: a client that is still writing
    would else see a reset connection in place of the answer.
    """
    declared = headers.get(b"content-length", b"0")
    too_large = declared.isdigit() and int(declared) > limit
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client left before its request was complete")
        if connection.is_late:
            raise HttpError(
                408,
                f"the request's body did not come within {BODY_SECONDS:.0f} s; send the request again",
                kind="invalid_request_error",
                code="request_timeout",
            )
        part = message.get("body", b"")
        size += len(part)
        too_large = too_large or size > limit
        if too_large:
            parts.clear()
        else:
            parts.append(part)
        if not message.get("more_body", False) or size > 2 * limit:
            break
    if too_large:
        raise HttpError(
            413,
            f"the request body is over {limit} bytes (POLAR_GATEWAY_MAX_REQUEST_BYTES)",
            kind="invalid_request_error",
            code="request_too_large",
        )
    return b"".join(parts)


def _engine_message(data: bytes) -> str:
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data[:500].decode("utf-8", "replace")
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            return str(error.get("message") or error.get("detail") or "")
        return str(error)
    return ""
