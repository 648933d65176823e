"""What a call says, on its way to its client, or to several that sent the same request.

    Exchange ── write, hold, release, fail ──▶ Answer ──▶ the client that asked: in the call's own task
                                                 └──────▶ clients that joined: `deliver`, each in its task

| waits for | who unblocks it | bound |
|---|---|---|
| the exchange: its own client's reading | that client, or its leaving | cancelled when the last one left |
| the exchange, when its own client left: room | the client that reads fastest | the same |
| a joined client's task: more to send | the exchange, its client's leaving | a sign of life, after seconds |

Invariants: headers go out with the first bytes or the first sign of life, so a refusal before
that keeps its status. The end is sent only once it is released, to every client the same.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from polar.core.dialects.base import Dialect
from polar.gateway.http_protocol import Connection
from polar.gateway.responses import STREAM_HEADERS, HttpError, Send, send_error, send_json
from schemas.base import shrunk

MAX_AHEAD_BYTES = 1 << 20
"""The exchange stops reading its engine when every client is so far behind."""

_TICK_SECONDS = 0.01
"""Timers may fire so much too early."""

Grown = Callable[["Answer", int], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """How an answer ends without being one."""

    error: HttpError
    in_stream: bytes
    """For clients whose headers were sent: an error in the dialect's events."""


class Answer:
    """One answer. The exchange that makes it and the clients share the event loop."""

    def __init__(self, dialect: Dialect, *, is_stream: bool, request_id: str = "") -> None:
        self.is_stream = is_stream
        self.failure: Failure | None = None
        self.is_over = False
        """Nothing more will be said."""
        self.is_whole = False
        """All of it is here, perhaps not released yet."""
        self.is_delivered = False
        """Some client took the end."""
        self.is_abandoned = False
        """The last client left before it was whole."""
        self.keep_alives = 0
        self.request_id = request_id
        """In the head of a stream: some harnesses know an API's answer by it."""
        self._dialect = dialect
        self._grown: Grown | None = None
        self._maker: asyncio.Task[Any] | None = None
        """Who makes the answer, while it can be cancelled."""
        self._own: _Client | None = None
        """The client that asked first, unless it left."""
        self._held = b""
        self._parts: list[bytes] = []
        self._clients: set[_Client] = set()
        self._size = 0
        self._room = asyncio.Event()

    # -- the exchange's side ----------------------------------------------------------------------

    @property
    def is_kept(self) -> bool:
        """Whether a client that comes now would get all of it."""
        return self._grown is not None

    def keep(self, grown: Grown) -> None:
        """Keep all of it for clients that join; `grown` hears of every byte."""
        self._grown = grown

    def stop_keeping(self) -> None:
        """Keep only what a client has yet to be sent."""
        self._grown = None
        self._let_go()

    async def write(self, data: bytes) -> None:
        """More of a streamed answer, in whole events; waits while all clients are far behind."""
        self._add(data)
        if self._own is not None:
            await self._send_new(self._own)
            return
        while self._clients and self._size - max(c.sent_bytes for c in self._clients) > MAX_AHEAD_BYTES:
            self._room.clear()
            await self._room.wait()

    def hold(self, end: bytes) -> None:
        """The rest of the answer, kept back until `release`."""
        self._held = end
        self.is_whole = True

    def release(self) -> None:
        """The answer may end."""
        self._add(self._held)
        self._over()

    def fail(self, error: HttpError, in_stream: bytes) -> None:
        """It ends with an error; what was held is not sent. The first end counts."""
        if not self.is_over:
            self.failure = Failure(error, in_stream)
            self.is_whole = False
            self._over()

    def _add(self, data: bytes) -> None:
        if self._grown is not None:
            data = data if self.is_stream else shrunk(data)
            self._grown(self, len(data))
        self._parts.append(data)
        self._size += len(data)
        self._wake()

    def _over(self) -> None:
        self._held = b""
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        for client in self._clients:
            if client is not self._own:
                client.wake.set()

    # -- the clients' side ------------------------------------------------------------------------

    async def make(
        self, work: Coroutine[Any, Any, None], connection: Connection, send: Send, keep_alive_seconds: float
    ) -> None:
        """Do the work that makes the answer, and send it to the client that asked.

        The work ends with the answer over, also when it is cancelled. It is cancelled when the last
        client leaves before the answer is whole.
        """
        self._maker = asyncio.current_task()
        client = self._own = _Client(send)
        self._clients.add(client)
        watch = _KeepAlive(self, client, keep_alive_seconds) if self.is_stream else None

        def left() -> None:
            self._own = None
            self._leave(client)

        connection.on_lost.add(left)
        try:
            if connection.is_lost:
                left()
            await work
            self._maker = None
            if self._own is not None:
                await self._send_new(client)
                self.is_delivered = self.is_delivered or not connection.is_lost
        finally:
            self._maker = self._own = None
            connection.on_lost.discard(left)
            if watch is not None:
                watch.stop()
            self._clients.discard(client)
            self._room.set()

    async def deliver(self, connection: Connection, send: Send, keep_alive_seconds: float) -> None:
        """Send it to a client that joined."""
        client = _Client(send)
        connection.on_lost.add(client.wake.set)
        self._clients.add(client)
        watch = _KeepAlive(self, client, keep_alive_seconds) if self.is_stream else None
        try:
            while not client.is_done:
                await client.wake.wait()
                client.wake.clear()
                if connection.is_lost:
                    return
                if self.is_over or client.num_sent < len(self._parts):
                    await self._send_new(client)
            self.is_delivered = self.is_delivered or not connection.is_lost
        finally:
            if watch is not None:
                watch.stop()
            connection.on_lost.discard(client.wake.set)
            self._leave(client)

    async def sign_of_life(self, client: "_Client") -> None:
        """Show a client of a stream that the gateway lives."""
        await client.begin(self.request_id)
        await client.send_part(self._dialect.keep_alive)
        self.keep_alives += 1

    def _leave(self, client: "_Client") -> None:
        self._clients.discard(client)
        self._room.set()
        if not self._clients and not self.is_whole and not self.is_over:
            self.is_abandoned = True
            if self._maker is not None:
                self._maker.cancel("the client disconnected")

    async def _send_new(self, client: "_Client") -> None:
        """Everything that the client has not got; its end too when the answer is over."""
        is_last = self.is_over
        client.is_sending = True
        new = self._parts[client.num_sent :]
        client.num_sent = len(self._parts)
        data = new[0] if len(new) == 1 else b"".join(new)
        if is_last and self.failure is not None and not client.has_begun:
            await send_error(client.send, self.failure.error, self._dialect)
        elif not self.is_stream:
            await send_json(client.send, 200, data)
        else:
            await client.begin(self.request_id)
            if is_last and self.failure is not None:
                data += self.failure.in_stream
            await client.send_part(data, is_last=is_last)
        client.is_done = is_last
        client.is_sending = False
        client.sent_at = asyncio.get_running_loop().time()
        client.sent_bytes += len(data)
        self._room.set()
        self._let_go()

    def _let_go(self) -> None:
        """Drop what the only client was sent, where nothing is kept for others."""
        if self._grown is None and len(self._clients) == 1:
            client = next(iter(self._clients))
            del self._parts[: client.num_sent]
            client.num_sent = 0


class _Client:
    """One HTTP response."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.wake = asyncio.Event()
        self.wake.set()
        self.has_begun = False
        self.is_done = False
        self.is_sending = False
        self.sent_at = asyncio.get_running_loop().time()
        """By the loop's clock; at first when it came."""
        self.num_sent = 0
        """Parts of the answer's list that it was sent."""
        self.sent_bytes = 0

    async def begin(self, request_id: str) -> None:
        """Send the head of a stream, once."""
        if not self.has_begun:
            self.has_begun = True
            headers = [*STREAM_HEADERS, (b"x-request-id", request_id.encode())]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send_part(self, data: bytes, *, is_last: bool = False) -> None:
        """Send some of a stream's body."""
        if data or is_last:
            await self.send({"type": "http.response.body", "body": data, "more_body": not is_last})


class _KeepAlive:
    """Signs of life for one client of a stream, whenever nothing was sent for so long."""

    def __init__(self, answer: Answer, client: _Client, seconds: float) -> None:
        self._answer = answer
        self._client = client
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._look)
        self._sending: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """The answer was sent, or its client left."""
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _look(self) -> None:
        client, now = self._client, self._loop.time()
        left = client.sent_at + self._seconds - now
        if left < _TICK_SECONDS:
            left = self._seconds
            if not client.is_sending and (self._sending is None or self._sending.done()):
                client.sent_at = now
                self._sending = self._loop.create_task(self._answer.sign_of_life(client))
        self._timer = self._loop.call_later(left, self._look)
