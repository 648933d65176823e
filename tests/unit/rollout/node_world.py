"""A node over a fake gateway and a list instead of a log."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from polar.core.stage import LogRecord, Partition
from polar.rollout.gateway_client import GatewayClient
from polar.rollout.node import Node
from polar.settings import NodeSettings
from schemas.base import Event, digest_of
from schemas.ids import group_of
from schemas.nodes import CancelSession, PrewarmRuntime, StartSession
from schemas.sessions import SessionFinished
from schemas.tasks import EvaluatorSpec, HarnessSpec, RuntimeSpec, TaskRequest, TimeoutSpec
from tests.unit.rollout.fake_gateway import FakeGateway, ListWriter

SECRET = b"s" * 64


def task(
    command: str = "true",
    *,
    evaluator: EvaluatorSpec | None = None,
    prepare: tuple[str, ...] = (),
    run_seconds: float = 20.0,
    init_seconds: float = 20.0,
    **more: Any,
) -> TaskRequest:
    return TaskRequest(
        harness=HarnessSpec(command=command),
        evaluator=evaluator or EvaluatorSpec(),
        runtime=RuntimeSpec(prepare=prepare, **more.pop("runtime", {})),
        timeouts=TimeoutSpec(run_seconds=run_seconds, init_seconds=init_seconds),
        **more,
    )


class NodeWorld:
    def __init__(self, directory: Path, gateway: FakeGateway, settings: NodeSettings) -> None:
        self.directory = directory
        self.gateway = gateway
        self.settings = settings
        self.writer = ListWriter()
        self.offset = 0

    @contextlib.asynccontextmanager
    async def node(self) -> AsyncIterator[Node]:
        """One life of the node, stopped orderly at the end."""
        async with GatewayClient(SECRET) as client:
            node = Node(self.settings, self.directory, self.writer, client, SECRET)
            await node.recover()
            try:
                yield node
            finally:
                await node.stop()

    def send(self, node: Node, event: Event) -> None:
        self.offset += 1
        node.on_record(LogRecord(Partition("node-commands.v1", 0), self.offset, self.settings.id, event))

    def start(self, node: Node, spec: TaskRequest, *, session_id: str = "t/0/0/1", url: str = "") -> None:
        self.send(
            node,
            StartSession(
                node_id=self.settings.id,
                session_id=session_id,
                group_id=group_of(session_id),
                gateway_id="g0",
                gateway_url=url or self.gateway.url,
                runtime_digest=digest_of(spec.runtime),
                task=spec,
            ),
        )

    def cancel(self, node: Node, session_id: str = "t/0/0/1") -> None:
        self.send(node, CancelSession(node_id=self.settings.id, session_id=session_id, reason="enough"))

    def prewarm(self, node: Node, spec: TaskRequest, count: int, number: int = 1) -> None:
        self.send(
            node,
            PrewarmRuntime(
                node_id=self.settings.id,
                command_id=f"1/{number}",
                runtime_digest=digest_of(spec.runtime),
                count=count,
                task=spec,
            ),
        )

    async def run(self, spec: TaskRequest, *, url: str = "") -> SessionFinished:
        """One session in a node of its own."""
        async with self.node() as node:
            self.start(node, spec, url=url)
            (finished,) = await self.writer.wait_for(SessionFinished)
            assert isinstance(finished, SessionFinished)
            return finished

    def runtime_files(self, name: str) -> list[Path]:
        return sorted((self.directory / "runtimes").glob(f"*/{name}"))


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def until(condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """The condition's value, once it is true; for states that send no signal."""
    async with asyncio.timeout(seconds):
        while not (value := condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return value


async def pid_in(world: NodeWorld, name: str) -> int:
    """The pid that a harness writes into a file of its runtime."""

    def complete() -> str:
        texts = [path.read_text() for path in world.runtime_files(name)]
        return texts[0] if texts and texts[0].endswith("\n") else ""

    return int(await until(complete))
