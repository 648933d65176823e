"""uvicorn's HTTP protocol with a limit on a request's head, and with word of a client that leaves.

Invariant: a connection holds at most `MAX_HEAD_BYTES` of a head, and what one read gives beside.
uvicorn bounds neither URL nor headers, and no application sees a request before its head is whole.
"""

from collections.abc import Callable
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polar.core.dialects.errors import ApiError
from polar.core.dialects.openai_shapes import error_object

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers. Harnesses send up to 6 KB; a key in the URL adds half a KB."""


CONNECTION = "polar.connection"
"""Where an ASGI scope has its Connection."""


class Connection:
    """What a request can know of the connection that it came over, without a task that waits for it."""

    def __init__(self) -> None:
        self.is_lost = False
        self.on_lost: set[Callable[[], object]] = set()
        """Called once when it is lost."""

    def lose(self) -> None:
        """The client is gone."""
        self.is_lost = True
        for call in list(self.on_lost):
            call()


def _refusal() -> bytes:
    message = f"the request's URL and headers are over {MAX_HEAD_BYTES} bytes"
    error = ApiError(431, message, "invalid_request_error", "headers_too_large")
    body = orjson.dumps(error_object(error))
    head = (
        "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


_REFUSAL = _refusal()


class BoundedHeadProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connection = Connection()
        self._head_bytes = 0
        """Of reads that ended in the same head in which they began."""
        self._is_in_head = True
        self._met_a_border = False

    def data_received(self, data: bytes) -> None:
        """More bytes of the peer."""
        if self.transport.is_closing():
            return
        self._met_a_border = False
        super().data_received(data)
        if self._met_a_border or not self._is_in_head:
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_REFUSAL)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """The head is whole, and was within the limit."""
        self._is_in_head, self._met_a_border = False, True
        cast("dict[str, Any]", self.scope)[CONNECTION] = self._connection
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer is gone, or we closed."""
        super().connection_lost(exc)
        self._connection.lose()

    def on_message_complete(self) -> None:
        """The next byte begins a head."""
        super().on_message_complete()
        self._is_in_head, self._met_a_border = True, True
