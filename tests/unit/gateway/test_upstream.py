"""Connections to engines: what arrives of an answer, what goes over which connection, what breaks."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import SettingsError
from polar.gateway import upstream
from polar.gateway.parts import running_parts
from polar.gateway.upstream import BrokenOffError, Origin, UnreachableError, Upstream
from polar.settings import GatewaySettings, LogSettings

PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers each request with the next of its scripts."""

    def __init__(self, *scripts: Serve) -> None:
        self.scripts = list(scripts)
        self.connections = 0
        self.requests: list[bytes] = []
        self.serving: set[asyncio.Task[None] | None] = set()
        self.asked = asyncio.Event()
        self.ended = asyncio.Event()
        """A client closed its connection."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.add(asyncio.current_task())
        self.connections += 1
        with contextlib.suppress(ConnectionError):
            while request := await read_request(reader):
                self.requests.append(request)
                self.asked.set()
                await self.scripts.pop(0)(reader, writer)
                if writer.is_closing():
                    break
        self.ended.set()
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
    return head + await reader.readexactly(length)


def says(*pieces: bytes, then: str = "") -> Serve:
    """Write pieces one by one; `then` "close" ends the connection, "wait" keeps it open in silence."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if then == "wait":
            await reader.read(1)
        if then:
            writer.close()

    return serve


@asynccontextmanager
async def served(server: Server, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Upstream, Origin]]:
    listening = await asyncio.start_server(server, "127.0.0.1", 0, ssl=tls)
    port = listening.sockets[0].getsockname()[1]
    client = Upstream()
    scheme, host = ("http", "127.0.0.1") if tls is None else ("https", "localhost")
    try:
        yield client, Origin.of(f"{scheme}://{host}:{port}/base/", "/v1/x", {"Authorization": "Bearer k"})
    finally:
        client.close()
        listening.close()
        await listening.wait_closed()
        await asyncio.gather(*[task for task in server.serving if task is not None])


async def ask(client: Upstream, origin: Origin, data: bytes = b"{}") -> tuple[int, bytes]:
    response = await client.post(origin, data, {"X-Call": "1"})
    try:
        return response.status, await response.read()
    finally:
        response.release()


async def test_a_request_as_it_goes_over_the_wire() -> None:
    server = Server(says(PLAIN))
    async with served(server) as (client, origin):
        assert await ask(client, origin, b'{"a":1}') == (200, b"hello")
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/v1/x HTTP/1.1"
    assert lines[1] == f"Host: 127.0.0.1:{origin.port}".encode()
    assert {b"Authorization: Bearer k", b"X-Call: 1", b"Content-Length: 7"} < set(lines)
    assert b"Accept-Encoding: identity" in lines
    assert body == b'{"a":1}'


class Pipe(asyncio.Transport):
    """What a connection writes to when there is no network."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    def writelines(self, _: object) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_closed = True


INTERIM = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
HEAD = b"HTTP/1.1 201 OK\r\nRetry-After: 3\r\n"
CHUNKS = b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n1;x=y\r\n \r\n5\r\nworld\r\n0\r\nT: t\r\n\r\n"
FORMS: dict[str, tuple[bytes, bytes, bool]] = {
    "length": (HEAD + b"Content-Length: 11\r\n\r\nhello world", b"hello world", True),
    "chunks": (HEAD + CHUNKS, b"hello world", True),
    "until the end": (HEAD + b"\r\nhello world", b"hello world", False),
    "nothing": (HEAD + b"content-length: 0\r\n\r\n", b"", True),
    "hint first": (INTERIM + HEAD + b"content-length: 2\r\n\r\nhi", b"hi", True),
    "last one": (HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\nhi", b"hi", False),
    "old": (HEAD.replace(b"1.1", b"1.0") + b"content-length: 2\r\n\r\nhi", b"hi", False),
}
"""(bytes of an answer, its body, whether its connection is kept)"""


@given(st.sampled_from(sorted(FORMS)), st.lists(st.integers(1, 200), max_size=12), st.booleans())
def test_an_answer_is_the_same_at_any_split(form: str, borders: list[int], at_once: bool) -> None:
    data, body, is_kept = FORMS[form]

    async def play() -> None:
        idle: list[upstream._Line] = []
        line = upstream._Line(idle, set())
        line.connection_made(Pipe())
        response = line.ask(b"", b"")
        reading = asyncio.create_task(response.read()) if at_once else None
        cuts = sorted({0, *(border for border in borders if border < len(data)), len(data)})
        got = b""
        for begin, end in pairwise(cuts):
            line.data_received(data[begin:end])
            await asyncio.sleep(0)
            if reading is None and response._parts:
                got += await response.readany()
        if form == "until the end":
            assert not response.is_whole
            line.connection_lost(None)
        got += await (reading if reading is not None else response.read())
        assert (response.status, got, response.headers["retry-after"]) == (201, body, "3")
        assert "link" not in response.headers
        response.release()
        assert (line in idle) is is_kept

    asyncio.run(play())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello", "ended"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", "ended"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-le", "ended"),
        (b"SSH-2.0-OpenSSH\r\n", "no HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "no HTTP|ended"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 12_000, "over 65536 bytes"),
        (b"", "ended"),
    ],
)  # fmt: skip
async def test_half_an_answer_is_broken_off_and_asked_for_once(data: bytes, why: str) -> None:
    server = Server(says(data, then="close"))
    async with served(server) as (client, origin):
        with pytest.raises(BrokenOffError, match=why) as raised:
            await ask(client, origin)
        assert not raised.value.is_stale
    assert len(server.requests) == 1


async def test_a_connection_serves_one_request_after_the_other() -> None:
    server = Server(says(PLAIN), says(PLAIN), says(PLAIN, PLAIN), says(PLAIN))
    async with served(server) as (client, origin):
        for _ in range(2):
            assert await ask(client, origin) == (200, b"hello")
        assert server.connections == 1
        # The third answer has something behind it that nobody asked for.
        assert await ask(client, origin) == (200, b"hello")
        await asyncio.wait_for(server.ended.wait(), 5)
        assert await ask(client, origin) == (200, b"hello")
        assert server.connections == 2


async def test_an_answer_that_says_close_is_the_last_of_its_connection() -> None:
    closing = PLAIN.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    server = Server(says(closing), says(PLAIN))
    async with served(server) as (client, origin):
        assert await ask(client, origin) == (200, b"hello")
        assert await ask(client, origin) == (200, b"hello")
        assert server.connections == 2


async def test_a_connection_that_was_idle_for_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(says(PLAIN), says(PLAIN))
    async with served(server) as (client, origin):
        await ask(client, origin)
        monkeypatch.setattr(upstream, "IDLE_SECONDS", -1.0)
        await ask(client, origin)
        assert server.connections == 2


async def test_calls_at_once_have_connections_of_their_own() -> None:
    server = Server(*[says(PLAIN) for _ in range(20)])
    async with served(server) as (client, origin):
        assert await asyncio.gather(*(ask(client, origin) for _ in range(20))) == [(200, b"hello")] * 20
        assert server.connections == 20


async def test_a_kept_connection_that_was_closed_meanwhile_costs_nothing() -> None:
    # The engine reads the request and closes: a kept connection met its time-out.
    server = Server(says(PLAIN), says(then="close"), says(PLAIN))
    async with served(server) as (client, origin):
        assert await ask(client, origin) == (200, b"hello")
        assert await ask(client, origin, b"[1]") == (200, b"hello")
        assert server.connections == 2
    assert [request[-3:] for request in server.requests[1:]] == [b"[1]", b"[1]"]


async def test_a_request_of_which_an_answer_began_is_not_sent_again() -> None:
    server = Server(says(PLAIN), says(b"HTTP/1.1 2", then="close"))
    async with served(server) as (client, origin):
        assert await ask(client, origin) == (200, b"hello")
        with pytest.raises(BrokenOffError):
            await ask(client, origin)
    assert len(server.requests) == 2


async def test_who_leaves_early_ends_the_connection() -> None:
    server = Server(says(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhe", then="wait"))
    async with served(server) as (client, origin):
        response = await client.post(origin, b"{}", {})
        assert await response.readany() == b"he"
        response.release()
        await asyncio.wait_for(server.ended.wait(), 5)


async def test_a_cancelled_request_ends_its_connection() -> None:
    server = Server(says(then="wait"))
    async with served(server) as (client, origin):
        asking = asyncio.create_task(ask(client, origin))
        async with asyncio.timeout(5):
            await server.asked.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await server.ended.wait()


async def test_a_slow_reader_slows_the_engine() -> None:
    size = 64 * upstream.MAX_AHEAD_BYTES
    sent = 0

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with served(Server(flood)) as (client, origin):
        response = await client.post(origin, b"{}", {})
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.2)
        assert sent < size // 2, "sockets hold some megabytes, the client one"
        got = 0
        while piece := await response.readany():
            got += len(piece)
        assert got == size
        response.release()


async def test_no_connection_is_told_apart() -> None:
    client = Upstream()
    with pytest.raises(UnreachableError):
        await client.post(Origin.of("http://127.0.0.1:1", "/", {}), b"", {})
    with pytest.raises(UnreachableError):
        await client.post(Origin.of("http://nowhere.invalid", "/", {}), b"", {})


@pytest.mark.parametrize("value", ["a\r\nHost: b", "a\nb", "a\rb"])
async def test_a_header_cannot_hold_another_one(value: str) -> None:
    with pytest.raises(ValueError, match="line end"):
        Origin.of("http://127.0.0.1:1", "/", {"Authorization": value})
    with pytest.raises(ValueError, match="line end"):
        await Upstream().post(Origin.of("http://127.0.0.1:1", "/", {}), b"", {"X-Call": value})


@pytest.mark.parametrize("url", ["", "engine:8000", "ftp://engine", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no http or https URL"):
        Origin.of(url, "/v1/chat/completions", {})


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """Of a server `localhost` that nobody vouches for."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, path = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(path)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path, key)
    return path, context


@pytest.mark.parametrize("url", ["http://", "http://engine:port", "http://user:secret@engine:8000"])
async def test_a_gateway_with_such_a_url_does_not_start(tmp_path: Path, url: str) -> None:
    settings = GatewaySettings(id="g", engines=f"engine-0={url}", model="policy")
    with pytest.raises(SettingsError, match="POLAR_GATEWAY_ENGINES") as raised:
        async with running_parts(LogSettings(data_dir=tmp_path), settings, b"s", nullcontext):
            pass
    assert "secret" not in str(raised.value)


async def test_an_engine_behind_tls_must_prove_its_name(
    certificate: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, context = certificate
    async with served(Server(), context) as (client, origin):
        with pytest.raises(UnreachableError, match="certificate"):
            await ask(client, origin)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    async with served(Server(says(PLAIN)), context) as (client, origin):
        assert await ask(client, origin) == (200, b"hello")


@pytest.mark.parametrize(
    "scenario",
    [
        test_a_request_as_it_goes_over_the_wire,
        test_a_connection_serves_one_request_after_the_other,
        test_an_answer_that_says_close_is_the_last_of_its_connection,
        test_calls_at_once_have_connections_of_their_own,
        test_a_kept_connection_that_was_closed_meanwhile_costs_nothing,
        test_a_request_of_which_an_answer_began_is_not_sent_again,
        test_who_leaves_early_ends_the_connection,
        test_a_cancelled_request_ends_its_connection,
        test_a_slow_reader_slows_the_engine,
        test_no_connection_is_told_apart,
    ],
)
def test_the_same_over_the_loop_that_gateways_have(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    uvloop.run(scenario())
