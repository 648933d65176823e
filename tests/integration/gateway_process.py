"""A gateway process whose log is a file: `python -m tests.integration.gateway_process FOLDER PORT ENGINE`."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from polar.core.stage import Partition
from polar.gateway.app import serve
from polar.settings import GatewaySettings, LogSettings
from schemas.base import Event
from schemas.nodes import GatewayHeartbeat
from schemas.topics import TopicSpec


class FileLog:
    """Appends events to a file; an acknowledgement takes a moment, as a broker's does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def write(self, event: Event) -> tuple[Partition, int]:
        assert isinstance(event, GatewayHeartbeat)
        return Partition("nodes.v1", 0), 0

    async def write_many_raw(
        self, topic: TopicSpec, records: Sequence[tuple[bytes | None, bytes | None, Mapping[str, bytes]]]
    ) -> list[tuple[Partition, int]]:
        with self._path.open("ab") as file:
            file.write(b"".join((value or b"") + b"\n" for _, value, _ in records))
        await asyncio.sleep(0.02)
        return [(Partition(topic.suffix, 0), 0) for _ in records]


def main(folder: str, port: str, engine: str) -> None:
    log = LogSettings(data_dir=Path(folder))
    settings = GatewaySettings(
        port=int(port), engines=engine, probe_seconds=0.1, seal_wait_seconds=1.0, shutdown_wait_seconds=3.0
    )
    asyncio.run(serve(log, settings, new_writer=lambda: FileLog(Path(folder) / "log")))


if __name__ == "__main__":
    main(*sys.argv[1:])
