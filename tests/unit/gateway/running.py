"""A gateway in the test's own event loop, with a log that the test controls."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp
import uvicorn

from polar.core.session_keys import SessionClaims, admin_token, mint
from polar.core.stage import Partition
from polar.errors import LogUnavailableError
from polar.gateway.app import server_config
from polar.gateway.parts import Parts, running_parts
from polar.kafka.writer import LogWriter
from polar.settings import GatewaySettings, LogSettings
from schemas.base import Event
from schemas.calls import CallRecord, SessionOpened, SessionSealed
from schemas.codec import decode
from schemas.nodes import GatewayHeartbeat
from schemas.tasks import SamplingSpec
from schemas.topics import TopicSpec

SECRET = b"0" * 64
SESSION = "task/0/0/1"
_TICK_SECONDS = 0.02


class FakeLog:
    """A broker in memory; `down` refuses, `gate` (when cleared) lets acknowledgements wait."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.batches: list[list[Event]] = []
        self.heartbeats: list[GatewayHeartbeat] = []
        self.down = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def write(self, event: Event) -> tuple[Partition, int]:
        if self.down:
            raise LogUnavailableError("no broker")
        assert isinstance(event, GatewayHeartbeat)
        self.heartbeats.append(event)
        return Partition("nodes.v1", 0), len(self.heartbeats)

    async def write_many_raw(
        self, topic: TopicSpec, records: Sequence[tuple[bytes | None, bytes | None, Mapping[str, bytes]]]
    ) -> list[tuple[Partition, int]]:
        await self.gate.wait()
        if self.down:
            raise LogUnavailableError("no broker")
        events = [decode(value, topic) for _, value, _ in records]
        assert [key for key, _, _ in records] == [topic.key_of(event).encode() for event in events]
        self.batches.append(events)
        self.events += events
        return [(Partition("calls.v1", 0), 0) for _ in events]

    def calls(self, session_id: str = SESSION) -> list[CallRecord]:
        return [e for e in self.events if isinstance(e, CallRecord) and e.session_id == session_id]

    def seals(self) -> list[SessionSealed]:
        return [event for event in self.events if isinstance(event, SessionSealed)]

    def opened(self) -> list[SessionOpened]:
        return [event for event in self.events if isinstance(event, SessionOpened)]


class RunningGateway:
    """A serving gateway and a client for it."""

    def __init__(self, url: str, parts: Parts, log: FakeLog, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.parts = parts
        self.log = log
        self.http = http
        self.server: uvicorn.Server

    def key(self, session_id: str = SESSION, **claims: Any) -> str:
        values: dict[str, Any] = {
            "session_id": session_id,
            "group_id": "task",
            "gateway_id": self.parts.settings.id,
            "expires_at": time.time() + 600,
        }
        return mint(SECRET, SessionClaims(**(values | claims)))

    async def admin(
        self, method: str, path: str, body: Any = None, token: str | None = None
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {admin_token(SECRET) if token is None else token}"}
        async with self.http.request(method, self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def open(self, session_id: str = SESSION, **claims: Any) -> str:
        """Open a session; returns its key."""
        sampling = claims.get("sampling", SamplingSpec())
        status, body = await self.admin(
            "POST",
            "/admin/sessions/open",
            {
                "session_id": session_id,
                "group_id": "task",
                "sampling": sampling.model_dump(),
                "trainable": claims.get("trainable", True),
                "expires_at": time.time() + 600,
            },
        )
        assert (status, body) == (200, {"opened": True})
        return self.key(session_id, **claims)

    async def seal(self, session_id: str = SESSION, outcome: str = "completed") -> int:
        body = {"session_id": session_id, "outcome": outcome, "reason": ""}
        status, answer = await self.admin("POST", "/admin/sessions/seal", body)
        assert status == 200, answer
        return int(answer["calls"])

    async def chat(
        self,
        key: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        path: str = "/v1/chat/completions",
        **headers: str,
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, JSON body, headers) of an unstreamed call."""
        data = raw if raw is not None else aiohttp.payload.JsonPayload(body or question())
        names = {"Authorization": f"Bearer {key}"} | {
            name.replace("_", "-"): v for name, v in headers.items()
        }
        async with self.http.post(self.url + path, data=data, headers=names) as response:
            return response.status, await response.json(), dict(response.headers)

    async def stream(self, key: str, body: dict[str, Any] | None = None) -> list[Any]:
        """Events of a streamed call, parsed; `[DONE]` as text."""
        headers = {"Authorization": f"Bearer {key}"}
        request = {**question(), **(body or {}), "stream": True}
        async with self.http.post(
            f"{self.url}/v1/chat/completions", json=request, headers=headers
        ) as response:
            assert response.status == 200, await response.text()
            return parse_events(await response.read())


def question(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "any-name", "messages": [{"role": "user", "content": text}], **fields}


def parse_events(data: bytes) -> list[Any]:
    texts = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    return ["[DONE]" if text == b"[DONE]" else json.loads(text) for text in texts]


def content_of(events: list[Any]) -> str:
    deltas = [c["delta"] for e in events if isinstance(e, dict) for c in e.get("choices", ())]
    return "".join(delta.get("content") or "" for delta in deltas)


async def eventually(condition: Any, seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - any condition, without a hook in the code
            await asyncio.sleep(0.005)


async def within(condition: Any, seconds: float) -> bool:
    """Whether a condition comes to hold in so much time of the event loop.

    A tick in which a busy machine gave the process no turn counts as one tick, however long it was.
    """
    for _ in range(round(seconds / _TICK_SECONDS)):
        if condition():
            return True
        await asyncio.sleep(_TICK_SECONDS)
    return bool(condition())


@asynccontextmanager
async def running_gateway(
    folder: Path,
    engines: str,
    log: FakeLog | None = None,
    *,
    real_log: LogSettings | None = None,
    wait_ready: bool = True,
    **settings: Any,
) -> AsyncIterator[RunningGateway]:
    """A gateway on a free port; with the same folder it goes on where another one stopped.

    `real_log` writes to a broker in place of the fake log.
    """
    fake = log or FakeLog()
    defaults = {
        "engines": engines,
        "probe_seconds": 0.05,
        "shutdown_wait_seconds": 1.0,
        "seal_wait_seconds": 0.3,
        "durable_on": "log",  # tests look at the log right behind an answer
    }
    gateway_settings = GatewaySettings(**(defaults | settings))
    log_settings = real_log or LogSettings(data_dir=folder, send_timeout_seconds=2.0)
    log_settings = log_settings.model_copy(update={"data_dir": folder})

    def new_writer() -> FakeLog | LogWriter:
        return fake if real_log is None else LogWriter(log_settings)

    async with running_parts(log_settings, gateway_settings, SECRET, new_writer) as parts:
        server = uvicorn.Server(server_config(parts, SECRET))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server._serve([listener]))
        try:
            await eventually(lambda: server.started)
            port = listener.getsockname()[1]
            async with aiohttp.ClientSession() as http:
                gateway = RunningGateway(f"http://127.0.0.1:{port}", parts, fake, http)
                gateway.server = server
                if wait_ready:
                    await eventually(lambda: parts.engines.trouble is None, 10.0)
                yield gateway
        finally:
            server.should_exit = True
            await serving
