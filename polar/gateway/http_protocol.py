"""uvicorn's HTTP protocol with limits on a request's size and time, and with word of a client that leaves.

| a connection waits for | bound |
|---|---|
| the first head, or the rest of one that began | `HEAD_SECONDS`, then 408 |
| the rest of a body | `BODY_SECONDS`, then 408 in the dialect, by who reads it |
| the next head | uvicorn's own time-out of kept-alive connections |

Invariant: a connection holds at most `MAX_HEAD_BYTES` of a head, and what one read gives beside.
uvicorn bounds neither URL nor headers nor their time, and no application sees a request before
its head is whole.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polar.core.dialects.errors import ApiError
from polar.core.dialects.openai_shapes import error_object

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers. Harnesses send up to 6 KB; a key in the URL adds half a KB."""
HEAD_SECONDS = 30.0
"""Harnesses send a head in one write; who takes so long for it would hold its connection for ever."""
BODY_SECONDS = 120.0
"""Behind the head. The largest body that is taken comes in time at 280 KB/s; harnesses are near."""
_ANSWER_SECONDS = 5.0
"""Whoever reads a late body may take so long to say so; then the connection is closed."""

CONNECTION = "polar.connection"
"""Where an ASGI scope has its Connection."""


class Connection:
    """What a request can know of the connection that it came over, without a task that waits for it."""

    def __init__(self) -> None:
        self.is_lost = False
        self.is_late = False
        """The rest of a body did not come in time, and will not be waited for."""
        self.on_lost: set[Callable[[], object]] = set()
        """Called once when it is lost."""

    def lose(self) -> None:
        """The client is gone."""
        self.is_lost = True
        for call in list(self.on_lost):
            call()


def _refusal(status: HTTPStatus, message: str, code: str) -> bytes:
    body = orjson.dumps(error_object(ApiError(status, message, "invalid_request_error", code)))
    head = (
        f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


_TOO_LARGE = _refusal(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the request's URL and headers are over {MAX_HEAD_BYTES} bytes",
    "headers_too_large",
)
_TOO_SLOW = _refusal(
    HTTPStatus.REQUEST_TIMEOUT,
    f"the request's URL and headers did not come within {HEAD_SECONDS:.0f} s; send the request again",
    "request_timeout",
)


class BoundedHeadProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connection = Connection()
        self._head_bytes = 0
        """Of reads that ended in the same head in which they began."""
        self._is_in_head = True
        self._met_a_border = False
        self._timer: asyncio.TimerHandle | None = None
        """Runs while a head or a body is awaited, but not between requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A peer came."""
        super().connection_made(transport)
        self._expect_within(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        """More bytes of the peer."""
        if self.transport.is_closing():
            return
        self._met_a_border = False
        super().data_received(data)
        if self._met_a_border or not self._is_in_head:
            self._head_bytes = 0
            if self._is_in_head:
                self._stop_timer()
            elif self._met_a_border:
                self._expect_within(BODY_SECONDS)
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._timer is None:
            self._expect_within(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        """The head is whole, and was within the limit."""
        self._is_in_head, self._met_a_border = False, True
        cast("dict[str, Any]", self.scope)[CONNECTION] = self._connection
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer is gone, or we closed."""
        self._stop_timer()
        super().connection_lost(exc)
        self._connection.lose()

    def on_message_complete(self) -> None:
        """The next byte begins a head."""
        super().on_message_complete()
        self._is_in_head, self._met_a_border = True, True

    def on_response_complete(self) -> None:
        """What came behind a request counts from its answer on."""
        super().on_response_complete()
        if self._timer is not None:
            self._expect_within(HEAD_SECONDS if self._is_in_head else BODY_SECONDS)

    def _expect_within(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._time_is_up, seconds)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self, seconds: float) -> None:
        is_answered = self.cycle is None or self.cycle.response_complete
        if self.transport.is_closing():
            return
        if self.pipeline or (self._is_in_head and not is_answered):
            # An earlier request is being answered, and what comes behind it may not even be read.
            self._expect_within(seconds)
        elif self._is_in_head or is_answered or self._connection.is_late:
            if self._head_bytes:
                self.transport.write(_TOO_SLOW)
            self.transport.close()
        else:
            self._connection.is_late = True
            self.cycle.message_event.set()
            self._expect_within(_ANSWER_SECONDS)
