"""What a call says, on its way to its client, or to several that sent the same request.

    Exchange ── write, hold, release, fail ──▶ Answer ──▶ one `deliver` per client ──▶ its socket

| waits for | who unblocks it | bound |
|---|---|---|
| a client's task: more to send | the exchange, its client's leaving | a sign of life, after seconds |
| the exchange: room | the client that reads fastest | it is cancelled when the last one left |

Invariants: headers go out with the first bytes or the first sign of life, so a refusal before
that keeps its status. The end is sent only once it is released, to every client the same.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from polar.core.dialects.base import Dialect
from polar.gateway.responses import STREAM_HEADERS, HttpError, Receive, Send, send_error, send_json

MAX_AHEAD_BYTES = 1 << 20
"""The exchange stops reading its engine when every client is so far behind."""

_TICK_SECONDS = 0.01
"""Timers may fire so much too early."""

Abandon = Callable[[str], object]
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
        self.abandon: Abandon = lambda _: None
        """Cancels who makes the answer; told why."""
        self.keep_alives = 0
        self.request_id = request_id
        """In the head of a stream: some harnesses know an API's answer by it."""
        self._dialect = dialect
        self._grown: Grown | None = None
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
        self._parts.append(data)
        self._size += len(data)
        if self._grown is not None:
            self._grown(self, len(data))
        self._wake()

    def _over(self) -> None:
        self._held = b""
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        for client in self._clients:
            client.wake.set()

    # -- the clients' side ------------------------------------------------------------------------

    async def deliver(self, receive: Receive, send: Send, keep_alive_seconds: float) -> bool:
        """Send it to one client; False when that left before the end.

        Without any client the answer is abandoned, unless it is whole.
        """
        client = _Client(send)
        gone = asyncio.ensure_future(_until_disconnect(receive))
        gone.add_done_callback(lambda _: client.wake.set())
        self._clients.add(client)
        why = "the client disconnected"
        try:
            return await self._to_its_end(client, gone, keep_alive_seconds)
        except asyncio.CancelledError:
            why = "the gateway is stopping"
            raise
        finally:
            gone.cancel()
            self._clients.discard(client)
            self._room.set()
            if not self._clients and not self.is_whole and not self.is_over:
                self.is_abandoned = True
                self.abandon(why)

    async def _to_its_end(self, client: "_Client", gone: "asyncio.Future[None]", seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        quiet_since = loop.time()
        timer = loop.call_later(seconds, client.be_due) if self.is_stream else None
        try:
            while True:
                await client.wake.wait()
                client.wake.clear()
                if gone.done():
                    return False
                if self.is_over or client.num_sent < len(self._parts):
                    await self._send_new(client)
                    quiet_since = loop.time()
                    if client.is_done:
                        self.is_delivered = self.is_delivered or not gone.done()
                        return not gone.done()
                if client.is_due:
                    client.is_due = False
                    left = quiet_since + seconds - loop.time()
                    if left < _TICK_SECONDS:
                        await client.begin(self.request_id)
                        await client.send_part(self._dialect.keep_alive)
                        self.keep_alives += 1
                        quiet_since, left = loop.time(), seconds
                    timer = loop.call_later(left, client.be_due)
        finally:
            if timer is not None:
                timer.cancel()

    async def _send_new(self, client: "_Client") -> None:
        """Everything that the client has not got; its end too when the answer is over."""
        is_last = self.is_over
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
        self.is_due = False
        """It is time for a sign of life, if nothing was sent meanwhile."""
        self.num_sent = 0
        """Parts of the answer's list that it was sent."""
        self.sent_bytes = 0

    def be_due(self) -> None:
        """The timer's word."""
        self.is_due = True
        self.wake.set()

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


async def _until_disconnect(receive: Receive) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
