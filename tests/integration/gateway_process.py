"""A gateway process whose log is a file: `python -m tests.integration.gateway_process FOLDER PORT ENGINE`."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from polar.core.stage import Emit, Partition
from polar.gateway.app import serve
from polar.settings import GatewaySettings, LogSettings
from schemas.base import Event, encode
from schemas.nodes import GatewayHeartbeat


class FileLog:
    """Appends events to a file; an acknowledgement takes a moment, as a broker's does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def write(self, event: Event) -> tuple[Partition, int]:
        return (await self.write_many([Emit(event)]))[0]

    async def write_many(self, events: Sequence[Emit]) -> list[tuple[Partition, int]]:
        kept = [encode(emit.event) + b"\n" for emit in events if not isinstance(emit.event, GatewayHeartbeat)]
        with self._path.open("ab") as file:
            file.write(b"".join(kept))
        await asyncio.sleep(0.02)
        return [(Partition("calls.v1", 0), 0) for _ in events]


def main(folder: str, port: str, engine: str) -> None:
    log = LogSettings(data_dir=Path(folder))
    settings = GatewaySettings(
        port=int(port), engines=engine, probe_seconds=0.1, seal_wait_seconds=1.0, shutdown_wait_seconds=3.0
    )
    asyncio.run(serve(log, settings, new_writer=lambda: FileLog(Path(folder) / "log")))


if __name__ == "__main__":
    main(*sys.argv[1:])
