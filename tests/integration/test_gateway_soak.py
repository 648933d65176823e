"""Ten thousand streams whose clients leave: nothing stays behind, in the gateway or its engine."""

import asyncio
import gc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from polar.core.stage import Partition
from schemas.base import Event
from schemas.calls import CallRecord, Delivery
from schemas.codec import decode
from schemas.topics import TopicSpec
from tests.unit.gateway.fake_engine import Connection, FakeEngine, running_engine
from tests.unit.gateway.running import FakeLog, RunningGateway, eventually, question, running_gateway

STREAMS = 10_000
AT_ONCE = 50
SESSION_CALLS = 500
PATHS = {
    "/v1/chat/completions": question("hi", stream=True),
    "/v1/messages": {
        "model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hi"}],
    },
    "/v1/responses": {"model": "m", "stream": True, "input": "hi"},
}  # fmt: skip


class CountingLog(FakeLog):
    """Keeps counts only, so that what grows is the gateway's."""

    def __init__(self) -> None:
        super().__init__()
        self.deliveries: dict[Delivery, int] = dict.fromkeys(Delivery, 0)
        self.others = 0

    async def write(self, event: Event) -> tuple[Partition, int]:
        return Partition("nodes.v1", 0), 0

    async def write_many_raw(
        self, topic: TopicSpec, records: Sequence[tuple[bytes | None, bytes | None, Mapping[str, bytes]]]
    ) -> list[tuple[Partition, int]]:
        for _, value, _ in records:
            event = decode(value, topic)
            if isinstance(event, CallRecord):
                self.deliveries[event.delivery] += 1
            else:
                self.others += 1
        return [(Partition(topic.suffix, 0), 0) for _ in records]


async def leave_early(gateway: RunningGateway, key: str, number: int) -> None:
    """Open a stream and abort the connection: before the head, behind it, or behind some text."""
    path, body = list(PATHS.items())[number % len(PATHS)]
    data = json.dumps(body | {"user": str(number)}).encode()
    port = int(gateway.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}"]
    lines += [f"content-length: {len(data)}", "", ""]
    writer.write("\r\n".join(lines).encode() + data)
    if number % 4:
        await reader.readuntil(b"\r\n\r\n")
    if number % 4 > 1:
        await reader.readuntil(b"\n\n")
    writer.transport.abort()


class Endless:
    """An engine's answers that stream until their client is gone."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.running = 0
        self.begun = 0
        engine.talk = self.talk

    async def talk(self, connection: Connection, body: dict[str, Any]) -> None:
        self.running += 1
        self.begun += 1
        try:
            await connection.head(200, "text/event-stream", None)
            for event in self._engine.chunks(body)[:2]:
                await connection.event(event)
            await connection.until_closed()
        finally:
            self.running -= 1


@pytest.mark.timeout(900)
async def test_aborted_streams_leave_nothing_behind(tmp_path: Path) -> None:
    log = CountingLog()
    process = psutil.Process()
    async with (
        running_engine() as engine,
        running_gateway(tmp_path, engine.url, log, retry_max_bytes=200_000) as gateway,
    ):
        endless = Endless(engine)
        tasks_before = 0
        sizes: list[tuple[int, int]] = []
        for begin in range(0, STREAMS, SESSION_CALLS):
            session_id = f"task/{begin}/0/1"
            key = await gateway.open(session_id)
            for first in range(begin, begin + SESSION_CALLS, AT_ONCE):
                await asyncio.gather(*(leave_early(gateway, key, first + i) for i in range(AT_ONCE)))
            await gateway.seal(session_id)
            await eventually(lambda: gateway.parts.sessions.num_in_flight == 0, 30.0)
            assert gateway.parts.retries.kept_bytes <= 200_000
            engine.requests.clear()
            engine.headers.clear()
            gc.collect()
            sizes.append((len(gc.get_objects()), process.memory_info().rss))
            tasks_before = tasks_before or len(asyncio.all_tasks())
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks_before, 10.0)
        await eventually(lambda: gateway.parts.spool.num_records == 0, 30.0)
        slot = gateway.parts.engines.slots["engine-0"]
        assert (slot.in_flight, len(slot.versions._open)) == (0, 0)
        assert (gateway.parts.retries.num_kept, gateway.parts.retries.kept_bytes) == (0, 0)
        assert gateway.parts.sessions._live == {}
        assert log.deliveries[Delivery.DELIVERED] == log.deliveries[Delivery.UPSTREAM_ERROR] == 0
        # A client that was gone before its request was read makes no call.
        assert STREAMS * 0.7 < log.deliveries[Delivery.CLIENT_ABORTED] <= STREAMS
        assert log.others == 2 * STREAMS / SESSION_CALLS
        assert endless.begun > STREAMS * 0.7
        await eventually(lambda: endless.running == 0, 10.0)
        # Flat: sealed sessions are remembered for a day, in a few hundred bytes each.
        settled = sizes[len(sizes) // 4]
        assert sizes[-1][0] - settled[0] < 5_000, sizes
        assert sizes[-1][1] - settled[1] < 16 * 2**20, sizes
