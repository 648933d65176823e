"""Scheduler and nodes as processes on a real broker, with a fake gateway in the test's process."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import httpx

from polar.kafka.writer import LogWriter
from polar.settings import LogSettings
from schemas.nodes import GatewayHeartbeat
from tests.brokers import free_port
from tests.unit.rollout.fake_gateway import FakeGateway

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 120.0


class RolloutDeployment:
    """`polar scheduler` and `polar node` processes by name."""

    def __init__(self, log: LogSettings, gateway: FakeGateway) -> None:
        self.log = log
        self.gateway = gateway
        self.port = free_port()
        self.api = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=60)
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, log: LogSettings, *nodes: str) -> AsyncIterator[Self]:
        """Scheduler and these nodes, up and known to one another."""
        async with FakeGateway().running() as gateway, LogWriter(log) as writer:
            deployment = cls(log, gateway)
            beating = asyncio.create_task(_beat(writer, gateway.url))
            try:
                await deployment.start("scheduler")
                for node in nodes:
                    await deployment.start(node)
                await deployment.until_up(len(nodes))
                yield deployment
            finally:
                beating.cancel()
                for name in list(deployment._processes):
                    await deployment.end(name)
                await deployment.api.aclose()

    async def start(self, name: str) -> None:
        """Start the scheduler, or a node of this id."""
        log = self.log
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("POLAR_")},
            "POLAR_BOOTSTRAP_SERVERS": log.bootstrap_servers,
            "POLAR_TOPIC_PREFIX": log.topic_prefix,
            "POLAR_SESSION_PARTITIONS": str(log.session_partitions),
            "POLAR_GROUP_PARTITIONS": str(log.group_partitions),
            "POLAR_FETCH_MAX_WAIT_MS": str(log.fetch_max_wait_ms),
            "POLAR_DATA_DIR": str(log.data_dir),
            "POLAR_SCHEDULER_PORT": str(self.port),
            "POLAR_SCHEDULER_READY_TARGET": "2",
            "POLAR_SCHEDULER_NODE_TIMEOUT_SECONDS": "5",
            "POLAR_NODE_ID": name,
            "POLAR_NODE_MAX_RUNNING": "4",
            "POLAR_LOG_LEVEL": "INFO",
        }
        service = "scheduler" if name == "scheduler" else "node"
        with (log.data_dir / f"{name}.log").open("ab") as output:
            self._processes[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "polar.cli.main", service,
                env=env, cwd=ROOT, stdout=output, stderr=output,
            )  # fmt: skip

    async def kill(self, name: str) -> None:
        """kill -9."""
        process = self._processes.pop(name)
        process.kill()
        await process.wait()

    async def end(self, name: str) -> int:
        """SIGTERM; the exit status."""
        process = self._processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            return await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise

    async def until_up(self, num_nodes: int) -> None:
        """Until the scheduler decides and has heard so many nodes."""

        async def is_up() -> bool:
            health = (await self.api.get("/health")).json()
            nodes = (await self.api.get("/nodes")).json()["nodes"]
            return bool(health["scheduler"]["is_deciding"]) and len(nodes) >= num_nodes

        await self.until(is_up)

    async def submit(self, task_id: str, command: str, **more: Any) -> None:
        """POST a task of a shell command."""
        body = {"task_id": task_id, "harness": {"command": command}, **more}
        answer = await self.api.post("/tasks", json=body)
        assert answer.status_code == 202, answer.text

    async def task(self, task_id: str) -> dict[str, Any]:
        """GET a task."""
        answer = await self.api.get(f"/tasks/{task_id}")
        value: dict[str, Any] = answer.json()
        return value

    async def finished(self, task_id: str) -> dict[str, Any]:
        """The task, once it is finished."""

        async def is_finished() -> bool:
            return (await self.task(task_id)).get("state") == "finished"

        await self.until(is_finished)
        return await self.task(task_id)

    async def until(self, condition: Any) -> None:
        """Until an async condition holds; a service that is not up yet is asked again."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    with contextlib.suppress(httpx.HTTPError):
                        if await condition():
                            return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            logs = "".join(
                f"\n== {path.name}\n{path.read_text()[-3000:]}" for path in self.log.data_dir.glob("*.log")
            )
            raise AssertionError(f"waited {PATIENCE_SECONDS:g} s in vain{logs}") from None


async def _beat(writer: LogWriter, url: str) -> None:
    """Heartbeats of the gateway, each second."""
    seq = 0
    while True:
        seq += 1
        await writer.write(GatewayHeartbeat(gateway_id="g0", incarnation="1", seq=seq, url=url))
        await asyncio.sleep(1)
