"""The gateway as a process: killed with -9 under load it loses nothing, and SIGTERM ends it whole."""

import asyncio
import random
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from polar.core.session_keys import SessionClaims, admin_token, mint
from polar.secret import load_secret
from polar.settings import LogSettings
from schemas.calls import CallRecord, Delivery, SessionOpened, SessionSealed
from schemas.codec import decode
from schemas.topics import CALLS
from tests.brokers import free_port
from tests.unit.gateway.fake_engine import FakeEngine, running_engine
from tests.unit.gateway.running import eventually


class World:
    """A gateway process that is started again and again on one folder."""

    def __init__(self, folder: Path, engine: FakeEngine, http: aiohttp.ClientSession) -> None:
        self.folder = folder
        self.engine = engine
        self.http = http
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.secret = load_secret(LogSettings(data_dir=folder))
        self.process: asyncio.subprocess.Process
        self.journal: list[str] = []
        """Ids of the answers whose end a client saw."""

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.integration.gateway_process",
            str(self.folder), str(self.port), self.engine.url,
        )  # fmt: skip
        async with asyncio.timeout(30):
            while True:
                try:
                    async with self.http.get(f"{self.url}/ready") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    assert self.process.returncode is None
                await asyncio.sleep(0.05)

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return await self.process.wait()

    def key(self, session_id: str) -> str:
        claims = SessionClaims(
            session_id=session_id, group_id="task", gateway_id="gateway-0", expires_at=time.time() + 600
        )
        return mint(self.secret, claims)

    async def admin(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask until the gateway answers, as a node does."""
        headers = {"Authorization": f"Bearer {admin_token(self.secret)}"}
        async with asyncio.timeout(60):
            while True:
                try:
                    async with self.http.post(self.url + path, json=body, headers=headers) as response:
                        if response.status == 200:
                            return dict(await response.json())
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)

    async def open(self, session_id: str) -> None:
        body = {"session_id": session_id, "group_id": "task", "expires_at": time.time() + 600}
        await self.admin("/admin/sessions/open", body)

    async def harness(self, session_id: str, rng: random.Random, stop: asyncio.Event) -> None:
        """Calls in a loop, streamed and not, through every death of the gateway."""
        headers = {"Authorization": f"Bearer {self.key(session_id)}"}
        while not stop.is_set():
            stream = rng.random() < 0.5
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
            try:
                async with self.http.post(
                    f"{self.url}/v1/chat/completions", json=body, headers=headers
                ) as response:
                    data = await response.read()
                    if response.status == 200 and (not stream or data.endswith(b"data: [DONE]\n\n")):
                        self.journal.append(
                            "chatcmpl-" + data.split(b'"chatcmpl-')[1].split(b'"')[0].decode()
                        )
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
            await asyncio.sleep(rng.random() * 0.02)

    def log(self) -> list[CallRecord | SessionOpened | SessionSealed]:
        lines = (self.folder / "log").read_bytes().splitlines()
        return [decode(line, CALLS) for line in lines]  # type: ignore[misc]


async def test_kill_9_under_load_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    rng = random.Random(7)
    async with running_engine() as engine, aiohttp.ClientSession() as http:
        engine.token_seconds = 0.01  # so that every death finds calls in flight
        world = World(tmp_path, engine, http)
        await world.start()
        sessions = [f"task/{number}/0/1" for number in range(4)]
        for session_id in sessions:
            await world.open(session_id)
        stop = asyncio.Event()
        harnesses = [asyncio.create_task(world.harness(session_id, rng, stop)) for session_id in sessions]
        for _ in range(3):
            before = len(world.journal)
            await eventually(lambda before=before: len(world.journal) >= before + 20, 30.0)
            await asyncio.sleep(rng.random() * 0.1)
            assert await world.end(signal.SIGKILL) == -signal.SIGKILL
            await world.start()
        stop.set()
        await asyncio.gather(*harnesses)
        sealed = {}
        for session_id in sessions:
            body = {"session_id": session_id, "outcome": "completed", "reason": ""}
            sealed[session_id] = (await world.admin("/admin/sessions/seal", body))["calls"]
        assert await world.end(signal.SIGTERM) == 0

        events = world.log()
        unique: dict[str, CallRecord] = {}
        for event in events:
            if isinstance(event, CallRecord):
                assert unique.setdefault(event.call_id, event) == event  # sent twice, but never two truths
        per_session = Counter(record.session_id for record in unique.values())
        assert per_session == sealed
        for session_id in sessions:
            mine = [event for event in events if event.session_id == session_id]
            assert isinstance(mine[0], SessionOpened)
            assert isinstance(mine[-1], SessionSealed)
            numbers = sorted(record.seq for record in unique.values() if record.session_id == session_id)
            assert numbers == list(range(1, len(numbers) + 1))
        answers = Counter(record.engine_request_id for record in unique.values() if record.engine_request_id)
        assert set(answers.values()) == {1}
        assert set(world.journal) <= set(answers)
        assert any(record.delivery is Delivery.CLIENT_ABORTED for record in unique.values())


async def test_sigterm_lets_calls_end_and_empties_the_spool(tmp_path: Path) -> None:
    async with running_engine() as engine, aiohttp.ClientSession() as http:
        world = World(tmp_path, engine, http)
        await world.start()
        await world.open("task/0/0/1")
        go_on = asyncio.Event()

        async def talk(connection: Any, body: dict[str, Any]) -> None:
            await go_on.wait()
            await connection.json(engine.answer(body))

        engine.talk = talk
        headers = {"Authorization": f"Bearer {world.key('task/0/0/1')}"}
        body = {"messages": [{"role": "user", "content": "hi"}]}
        async with aiohttp.ClientSession() as client:
            call = asyncio.create_task(
                client.post(f"{world.url}/v1/chat/completions", json=body, headers=headers)
            )
            await eventually(lambda: engine.requests, 10.0)
            world.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            go_on.set()
            async with await call as response:
                assert response.status == 200
        assert await world.process.wait() == 0
        assert [type(event) for event in world.log()] == [SessionOpened, CallRecord]


async def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.integration.gateway_process",
            str(tmp_path), str(taken.getsockname()[1]), "http://127.0.0.1:9",
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, text = await process.communicate()
    assert process.returncode
    assert b"POLAR_GATEWAY_PORT" in text
