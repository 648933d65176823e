"""A client that sends slowly, or nothing at all, holds no connection for ever; one that waits long may."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from polar.core.session_keys import admin_token
from polar.gateway import http_protocol
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.running import SECRET, RunningGateway, eventually, question
from tests.unit.gateway.test_security import REQUESTS, error_of

SECONDS = 0.3
PATIENCE = 10.0
"""Far above SECONDS: a busy machine is no failure."""


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_SECONDS", "BODY_SECONDS", "_ANSWER_SECONDS"):
        monkeypatch.setattr(http_protocol, name, SECONDS)


class Client:
    """A connection on which a test sends what it wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, gateway: RunningGateway) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2])))

    async def trickle(self, data: bytes) -> None:
        """Send byte by byte until the other side closes."""
        with contextlib.suppress(ConnectionError):
            for byte in data:
                if self.reader.at_eof():
                    return
                self.writer.write(bytes([byte]))
                await self.writer.drain()
                await asyncio.sleep(SECONDS / 10)

    async def rest(self) -> bytes:
        """What comes until the other side closes."""
        async with asyncio.timeout(PATIENCE):
            return await self.reader.read()

    async def answer(self) -> tuple[int, Any]:
        """(status, body) of one answer; the connection stays open."""
        async with asyncio.timeout(PATIENCE):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            return int(head.split(b" ", 2)[1]), json.loads(await self.reader.readexactly(int(length[1])))


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[Client]:
    client = await Client.of(gateway)
    yield client
    client.writer.close()


def request(key: str, path: str = "/v1/chat/completions", body: Any = None) -> tuple[bytes, bytes]:
    """(head, body)."""
    data = json.dumps(question() if body is None else body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        f"authorization: Bearer {key}",
        f"content-length: {len(data)}",
    ]
    return "".join([line + "\r\n" for line in [*lines, ""]]).encode(), data


def parted(answer: bytes) -> tuple[bytes, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return head.split(b"\r\n")[0], json.loads(body)


async def test_who_sends_nothing_is_closed(client: Client) -> None:
    assert await client.rest() == b""


async def test_a_head_that_does_not_end_is_answered_408(client: Client) -> None:
    sending = asyncio.create_task(
        client.trickle(b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: " + b"a" * 1000)
    )
    line, body = parted(await client.rest())
    assert line == b"HTTP/1.1 408 Request Timeout"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == "request_timeout"
    await sending


async def test_so_is_a_later_head_on_the_same_connection(gateway: RunningGateway, client: Client) -> None:
    client.writer.write(b"".join(request(await gateway.open())))
    assert (await client.answer())[0] == 200
    await asyncio.sleep(2 * SECONDS)  # between requests nothing is awaited
    sending = asyncio.create_task(client.trickle(b"GET /health HTTP/1.1\r\nx-slow: " + b"a" * 1000))
    assert parted(await client.rest())[0] == b"HTTP/1.1 408 Request Timeout"
    await sending


@pytest.mark.parametrize("how", ["stalls", "trickles"])
@pytest.mark.parametrize("path", REQUESTS)
async def test_a_body_that_does_not_end_is_answered_408_in_its_dialect(
    gateway: RunningGateway, engine: FakeEngine, client: Client, path: str, how: str
) -> None:
    head, data = request(await gateway.open(), path, REQUESTS[path])
    client.writer.write(head + data[:10])
    sending = asyncio.create_task(client.trickle(b" " * 40 if how == "trickles" else b""))
    line, body = parted(await client.rest())
    assert line.startswith(b"HTTP/1.1 408")
    assert "did not come" in error_of(path, body)
    await sending
    await eventually(lambda: gateway.parts.proxy._num_requests == 0)
    assert (engine.requests, gateway.log.calls()) == ([], [])
    assert gateway.parts.metrics()["refusals_by_status_total"] == {"408": 1}


async def test_a_body_that_nobody_waits_for_holds_no_connection(
    gateway: RunningGateway, client: Client
) -> None:
    """Behind a refusal, and where the reader is none of ours."""
    head, data = request("sk-polar-nobody")
    client.writer.write(head + data[:10])
    assert (await client.answer())[0] == 401
    sending = asyncio.create_task(client.trickle(b" " * 1000))
    assert await client.rest() == b""
    await sending
    other = await Client.of(gateway)
    other.writer.write(request(admin_token(SECRET), "/admin/engines/drain", {"engine_id": "engine-0"})[0])
    assert await other.rest() == b""
    other.writer.close()


async def test_a_slow_answer_is_not_a_slow_request(
    gateway: RunningGateway, engine: FakeEngine, client: Client
) -> None:
    """Also when the client begins its next request before the answer is there."""
    engine.token_seconds = 4 * SECONDS
    key = await gateway.open()
    first, second = (b"".join(request(key, body=question(text))) for text in ("a", "b"))
    client.writer.write(first)
    await eventually(lambda: len(engine.requests) == 1)
    client.writer.write(second[:50])
    await asyncio.sleep(2 * SECONDS)
    client.writer.write(second[50:-5])  # read when the first is answered
    await asyncio.sleep(SECONDS)
    client.writer.write(second[-5:])
    assert (await client.answer())[0] == 200
    assert (await client.answer())[0] == 200
    assert len(engine.requests) == 2
