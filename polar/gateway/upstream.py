"""Connections to engines for calls: HTTP/1.1 as far as a call needs it, parsed by httptools.

Engines answer a POST with a length, in chunks, or up to the end of the connection, with status and body;
nothing else is understood. aiohttp, which asks them everything else, costs a call three times as much
(DECISIONS 57).

| waits for | bound, or who unblocks it |
|---|---|
| a connection | `CONNECT_SECONDS` |
| an answer | it comes, the connection breaks, or the waiting task is cancelled |
| a reader of the answer | the engine is not read from beyond `MAX_AHEAD_BYTES` |

Invariant: a connection serves one request at a time, and the next only when the whole answer was read
off it and the engine did not end it.
"""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

CONNECT_SECONDS = 5.0
MAX_HEAD_BYTES = 64 * 1024
MAX_AHEAD_BYTES = 1024 * 1024
IDLE_SECONDS = 15.0
"""A connection that was idle for longer is not used again: what lies between may have dropped it."""


class UnreachableError(ConnectionError):
    """There is no connection."""


class BrokenOffError(ConnectionError):
    """The answer did not come, or not to its end."""

    def __init__(self, message: str, *, is_stale: bool = False) -> None:
        """`is_stale`: it was a connection from before, and not a byte of an answer came over it."""
        super().__init__(message)
        self.is_stale = is_stale


@dataclass(frozen=True, slots=True)
class Origin:
    """Where requests go, and what all of them begin with."""

    host: str
    port: int
    tls: bool
    head: bytes
    """Request line and headers, as far as they are always the same."""

    @classmethod
    def of(cls, url: str, path: str, headers: Mapping[str, str]) -> Self:
        """POST requests for `path` below `url`. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http or https URL")
        if parts.username is not None:
            raise ValueError("an engine's URL holds no user: give its key as a file")
        fields = {
            "Host": parts.netloc,
            "User-Agent": "polar",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            **headers,
        }
        tls = parts.scheme == "https"
        head = f"POST {parts.path.rstrip('/')}{path} HTTP/1.1\r\n".encode("ascii") + _lines(fields)
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, head)


class Response:
    """An answer whose head is here; its body may be on its way."""

    def __init__(self, line: "_Line") -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """By name in lower case."""
        self.is_whole = False
        self._line = line
        self._parts: list[bytes] = []
        self._size = 0
        self._error: BrokenOffError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wants_all = False
        self._is_released = False

    async def read(self) -> bytes:
        """All that has not been read. Raises BrokenOffError."""
        self._wants_all = True
        self._line.resume()
        while not self.is_whole:
            await self._more()
        return self._taken()

    async def readany(self) -> bytes:
        """What has come since; nothing at the end. Raises BrokenOffError."""
        while not self._parts and not self.is_whole:
            await self._more()
        self._line.resume()
        return self._taken()

    def release(self) -> None:
        """Nobody reads on: the connection serves the next request, or ends where the rest is not here."""
        if not self._is_released:
            self._is_released = True
            self._line.release(self)

    async def begun(self) -> None:
        """Wait for the head. Raises BrokenOffError."""
        while not self.status:
            await self._more()

    # -- the connection's side --------------------------------------------------------------------

    def begin(self, status: int) -> None:
        """The head is whole."""
        self.status = status
        self._wake()

    def add(self, data: bytes) -> bool:
        """More of the body; whether this is far ahead of who reads it."""
        self._parts.append(data)
        self._size += len(data)
        if not self._wants_all:
            self._wake()
        return self._size > MAX_AHEAD_BYTES and not self._wants_all

    def end(self) -> None:
        """The body is whole."""
        self.is_whole = True
        self._wake()

    def fail(self, error: BrokenOffError) -> None:
        """Nothing more will come."""
        self._error = self._error or error
        self._wake()

    def _more(self) -> asyncio.Future[None]:
        """Done when something has come. Raises BrokenOffError."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _taken(self) -> bytes:
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        return data

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Line(asyncio.Protocol):
    """One connection."""

    def __init__(self, idle: "list[_Line]", lines: "set[_Line]") -> None:
        self._idle = idle
        self._lines = lines
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._head_bytes = 0
        self._is_interim = False
        """What comes is a 1xx, which an answer follows."""
        self._keeps_alive = True
        self._is_paused = False
        self._is_reused = False
        self._is_lost = False
        self.idle_since = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent over it."""
        return not self._is_lost and self._keeps_alive and not self._transport.is_closing()

    def ask(self, head: bytes, data: bytes) -> Response:
        """Send a request; its answer as it comes."""
        self._response = response = Response(self)
        self._head_bytes = 0
        self._transport.writelines((head, data))
        return response

    def resume(self) -> None:
        """Who reads wants more."""
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def release(self, response: Response) -> None:
        """Its answer is done with, read or not."""
        was_mine, self._response = response is self._response, None
        if was_mine and response.is_whole and self.is_usable:
            self.resume()
            self._is_reused = True
            self.idle_since = asyncio.get_running_loop().time()
            self._idle.append(self)
        else:
            # At once: the engine may stop what nobody will read.
            self._transport.abort()

    def close(self) -> None:
        """End it."""
        self._transport.abort()

    # -- asyncio ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast("asyncio.Transport", transport)
        self._lines.add(self)

    def data_received(self, data: bytes) -> None:
        """Some of an answer."""
        response = self._response
        if response is None or response.is_whole:
            self.close()  # nobody asked for that
            return
        self._head_bytes += 0 if response.status else len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(response, f"it answers no HTTP ({error})")
        if self._head_bytes > MAX_HEAD_BYTES and not response.status:
            self._break(response, f"the head of its answer is over {MAX_HEAD_BYTES} bytes")

    def connection_lost(self, error: Exception | None) -> None:
        """It has ended."""
        self._is_lost = True
        self._lines.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        response = self._response
        if response is None or response.is_whole:
            return
        if response.status and _is_until_close(response.headers) and error is None:
            response.end()
            return
        is_stale = self._is_reused and not self._head_bytes
        response.fail(BrokenOffError(f"the connection ended: {error or 'closed'}", is_stale=is_stale))

    # -- httptools --------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A head comes: the answer's, or one that nobody asked for."""
        if self._response is not None and self._response.is_whole:
            self._keeps_alive, self._response = False, None

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if self._response is not None:
            self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head is whole."""
        status = self._parser.get_status_code()
        self._is_interim = status < 200
        if self._response is None:
            return
        if self._is_interim:
            self._response.headers.clear()
        else:
            self._response.begin(status)

    def on_body(self, body: bytes) -> None:
        """Some of the body."""
        if self._response is not None and self._response.add(body) and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self._response is not None and not self._is_interim:
            self._keeps_alive = self._parser.should_keep_alive()
            self._response.end()

    def _break(self, response: Response, why: str) -> None:
        self._keeps_alive = False
        response.fail(BrokenOffError(why))
        self.close()


class Upstream:
    """The connections of one gateway to all its engines: as many as there are calls, kept alive."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int, bool], list[_Line]] = {}
        self._lines: set[_Line] = set()
        self._tls: ssl.SSLContext | None = None

    async def post(self, origin: Origin, data: bytes, headers: Mapping[str, str]) -> Response:
        """Send a request; its answer once the head is here. The caller releases it.

        A connection that the engine closed at this very moment is not the request's fault: where it was
        one from before, and nothing came over it, the request is sent a second time.
        Raises UnreachableError, BrokenOffError, and ValueError for a header with a line end.
        """
        length = b"Content-Length: %d\r\n\r\n" % len(data)
        head = b"".join((origin.head, _lines(headers), length))
        line = self._kept(origin)
        if line is not None:
            try:
                return await _answered(line, head, data)
            except BrokenOffError as error:
                if not error.is_stale:
                    raise
        return await _answered(await self._connect(origin), head, data)

    def close(self) -> None:
        """End all connections."""
        for line in list(self._lines):
            line.close()

    def _kept(self, origin: Origin) -> _Line | None:
        idle = self._idle.get((origin.host, origin.port, origin.tls), [])
        oldest = asyncio.get_running_loop().time() - IDLE_SECONDS
        while idle:
            line = idle.pop()
            if line.is_usable and line.idle_since >= oldest:
                return line
            line.close()
        return None

    async def _connect(self, origin: Origin) -> _Line:
        idle = self._idle.setdefault((origin.host, origin.port, origin.tls), [])
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, line = await asyncio.get_running_loop().create_connection(
                    lambda: _Line(idle, self._lines),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except TimeoutError as error:
            raise UnreachableError(f"no connection within {CONNECT_SECONDS:g} s") from error
        except OSError as error:
            raise UnreachableError(str(error)) from error
        return line


async def _answered(line: _Line, head: bytes, data: bytes) -> Response:
    if not line.is_usable:
        raise BrokenOffError("the connection ended at once")
    response = line.ask(head, data)
    try:
        await response.begun()
    except BaseException:
        response.release()
        raise
    return response


def _lines(headers: Mapping[str, str]) -> bytes:
    """Headers as they go over the wire. Raises ValueError."""
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers):
        raise ValueError("a header holds a line end")
    return text.encode("latin-1")


def _is_until_close(headers: Mapping[str, str]) -> bool:
    return "content-length" not in headers and "chunked" not in headers.get("transfer-encoding", "").lower()
