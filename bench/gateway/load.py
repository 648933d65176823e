"""Load: raw HTTP over kept-alive connections, closed loop for throughput, Poisson arrivals for latency.

A request is bytes made beforehand; an answer is only looked at as far as its end has to be found, so that
the generator costs a small part of what it measures.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

CHAT_PATH = "/v1/chat/completions"
_END_OF_CHUNKS = b"0\r\n\r\n"


def request(port: int, body: bytes, *, key: str = "", path: str = CHAT_PATH) -> bytes:
    """One POST as it goes over the wire."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(slots=True)
class Timings:
    """What was seen of some calls."""

    seconds: list[float] = field(default_factory=list)
    """Request sent to end of answer."""
    first: list[float] = field(default_factory=list)
    """Request sent to first byte of a body."""
    failed: int = 0
    """Answers without status 200, and connections that broke."""
    trouble: str = ""
    """The first failure, for people."""
    wall: float = 0.0
    """Seconds from the first request to the last answer."""
    answer_bytes: int = 0


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._head = bytearray()
        self._left = -1
        self._tail = b""
        self.status = 0
        self.num_bytes = 0
        self.first_at = 0.0
        self.sample = b""
        self.body: bytearray | None = None
        """Kept where somebody wants it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    async def call(self, data: bytes) -> None:
        """Send; returns when the answer has ended. Raises ConnectionError."""
        assert self._transport is not None
        self._ended = asyncio.get_running_loop().create_future()
        self._head.clear()
        self.status = self.num_bytes = 0
        self.first_at = 0.0
        self._transport.write(data)
        await self._ended

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if not self.status:
            self._head += data
            head, found, data = bytes(self._head).partition(b"\r\n\r\n")
            if not found:
                return
            self.status = int(head[9:12])
            self.sample = data[:300]
            self._left, self._tail = _length(head), b""
        if self.body is not None:
            self.body += data
        if data and not self.first_at:
            self.first_at = time.perf_counter()
        if self._left >= 0:
            self._left -= len(data)
            done = self._left <= 0
        else:
            self._tail = (self._tail + data)[-len(_END_OF_CHUNKS) :]
            done = self._tail == _END_OF_CHUNKS
        if done and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError(f"the connection broke: {error}"))

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()


class Client:
    """Kept-alive connections to one port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[_Connection] = []
        self.timings = Timings()
        self._next_body: bytearray | None = None

    async def call(self, data: bytes) -> bool:
        """One call on a free connection, noted in `timings`; whether it was answered with 200."""
        connection = self._idle.pop() if self._idle else None
        if connection is None:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, "127.0.0.1", self._port
            )
        connection.body = self._next_body
        self._next_body = None
        begun = time.perf_counter()
        try:
            await connection.call(data)
        except ConnectionError as error:
            self._fail(str(error))
            return False
        ended = time.perf_counter()
        self._idle.append(connection)
        if connection.status != 200:
            self._fail(f"{connection.status} {connection.sample!r}")
            return False
        self.timings.seconds.append(ended - begun)
        self.timings.first.append(connection.first_at - begun)
        self.timings.answer_bytes += connection.num_bytes
        return True

    async def ask(self, data: bytes) -> bytes:
        """One call of which the body is wanted. Raises RuntimeError when it fails."""
        self._next_body = body = bytearray()
        if not await self.call(data):
            raise RuntimeError(self.timings.trouble)
        return bytes(body)

    def close(self) -> None:
        """Drop all connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _fail(self, trouble: str) -> None:
        self.timings.failed += 1
        self.timings.trouble = self.timings.trouble or trouble


async def closed_loop(port: int, requests: Sequence[bytes], in_flight: int) -> Timings:
    """All requests, `in_flight` at a time."""
    client = Client(port)
    waiting: Iterator[bytes] = iter(requests)

    async def work() -> None:
        for data in waiting:
            await client.call(data)

    begun = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(min(in_flight, len(requests)))))
    client.timings.wall = time.perf_counter() - begun
    client.close()
    return client.timings


async def open_loop(port: int, requests: Sequence[bytes], per_second: float, seed: int) -> Timings:
    """All requests at Poisson arrivals, whatever has become of those before."""
    client = Client(port)
    source = random.Random(seed)
    begun = due = time.perf_counter()
    calls: list[asyncio.Task[bool]] = []
    for data in requests:
        due += source.expovariate(per_second)
        if (pause := due - time.perf_counter()) > 0:
            await asyncio.sleep(pause)
        calls.append(asyncio.create_task(client.call(data)))
    await asyncio.gather(*calls)
    client.timings.wall = time.perf_counter() - begun
    client.close()
    return client.timings


def _length(head: bytes) -> int:
    """Content-Length; -1 for a chunked body."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return -1
