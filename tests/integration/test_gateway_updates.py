"""Weights change under load on two engines: no call is refused, no interval of versions is too narrow."""

import asyncio
import random
from pathlib import Path
from typing import Any

from polar.core.session_keys import admin_token
from polar.weightsync.gateways import Gateways
from schemas.calls import Delivery
from schemas.policies import BASE_VERSION, PolicyVersion
from tests.unit.gateway.fake_engine import Connection, FakeEngine, running_engine
from tests.unit.gateway.running import SECRET, RunningGateway, question, running_gateway

UPDATES = 6
SESSIONS = 8


class UpdatedEngine:
    """An engine whose weights are changed as weight-sync does it; it knows under which it sampled."""

    def __init__(self, engine_id: str, engine: FakeEngine) -> None:
        self.engine_id = engine_id
        self.version = BASE_VERSION
        self.sampled_under: dict[str, set[PolicyVersion]] = {}
        """Versions by the engine's id of an answer."""
        self._engine = engine
        self._running = asyncio.Event()
        self._running.set()
        engine.talk = self.talk

    async def talk(self, connection: Connection, body: dict[str, Any]) -> None:
        chunks = self._engine.chunks(body)
        name = f"{self.engine_id}-{len(self.sampled_under)}"
        used = self.sampled_under[name] = set()
        await connection.head(200, "text/event-stream", None)
        for chunk in chunks:
            await self._running.wait()
            if isinstance(chunk, dict):
                chunk["id"] = name
                if chunk["choices"] and chunk["choices"][0].get("token_ids"):
                    used.add(self.version)
            await connection.event(chunk)
            await asyncio.sleep(0.002)
        await connection.end_chunks()

    async def update(self, to: PolicyVersion, gateways: Gateways, seconds: float) -> None:
        self._running.clear()
        await gateways.tell(self.engine_id, "pending", to)
        await asyncio.sleep(seconds)
        self.version = to
        self._engine.weight_version = str(to)
        await gateways.tell(self.engine_id, "settled", to)
        self._running.set()


async def harness(gateway: RunningGateway, session_id: str, stop: asyncio.Event) -> None:
    key = await gateway.open(session_id)
    number = 0
    while not stop.is_set():
        number += 1
        events = await gateway.stream(key, question(f"question {number}"))
        assert events[-1] == "[DONE]"


async def test_updates_refuse_nothing_and_every_interval_holds_what_was_sampled(tmp_path: Path) -> None:
    rng = random.Random(3)
    async with (
        running_engine() as first,
        running_engine() as second,
        running_gateway(tmp_path, f"a={first.url},b={second.url}") as gateway,
    ):
        engines = [UpdatedEngine("a", first), UpdatedEngine("b", second)]
        gateways = Gateways(gateway.url, admin_token(SECRET), timeout_seconds=10.0)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            sessions = [f"task/{number}/0/1" for number in range(SESSIONS)]
            for session_id in sessions:
                group.create_task(harness(gateway, session_id, stop))
            for step in range(1, UPDATES + 1):
                await asyncio.sleep(0.1)
                to = PolicyVersion(lineage="run", step=step)
                # Sometimes together, sometimes one behind the other.
                seconds = [0.05 + 0.2 * rng.random() for _ in engines]
                updates = [engine.update(to, gateways, s) for engine, s in zip(engines, seconds, strict=True)]
                if step % 2:
                    await asyncio.gather(*updates)
                else:
                    for update in updates:
                        await update
            await asyncio.sleep(0.1)
            stop.set()
        await gateways.close()
        assert gateway.parts.proxy.refusals == {}
        assert gateway.parts.engines.num_waiting == 0
        truth = engines[0].sampled_under | engines[1].sampled_under
        records = [record for session_id in sessions for record in gateway.log.calls(session_id)]
        assert len(records) == len(truth) > 50
        straddling = 0
        for record in records:
            assert record.delivery is Delivery.DELIVERED
            used = sorted(step_of(version) for version in truth[record.engine_request_id])
            first_step, last_step = step_of(record.policy.first), step_of(record.policy.last)
            assert first_step <= used[0]
            assert used[-1] <= last_step
            straddling += len(used) > 1
        assert straddling > 0  # some calls were in flight while weights changed
        assert {record.engine_id for record in records} == {"a", "b"}
        # At the end both engines are current, and new calls are sampled under the newest weights alone.
        newest = [r for r in records if r.policy.first == r.policy.last == engines[0].version]
        assert newest


def step_of(version: PolicyVersion) -> int:
    return -1 if version == BASE_VERSION else version.step
