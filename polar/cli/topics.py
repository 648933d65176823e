"""`polar topics`: create what the topics table names (the first step of a deployment)."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from polar.settings import LogSettings

Json = Annotated[bool, typer.Option("--json", help="Print the topics as JSON.")]
Replication = Annotated[int, typer.Option(help="Replication factor of new topics.", min=1)]
Wait = Annotated[float, typer.Option(help="Seconds to wait for the broker.", min=0)]


def topics(replication: Replication = 1, wait: Wait = 60.0, as_json: Json = False) -> None:
    """Create all topics that are missing; complain when partition counts differ."""
    import asyncio

    from polar.settings import LogSettings
    from polar.telemetry.logs import configure
    from schemas.topics import TOPICS

    settings = LogSettings()
    configure("topics", is_command=True)
    asyncio.run(_ensure(settings, replication=replication, wait_seconds=wait))
    names = [topic.named(settings.topic_prefix) for topic in TOPICS]
    if as_json:
        sys.stdout.write(json.dumps({"topics": names}) + "\n")


async def _ensure(settings: "LogSettings", *, replication: int, wait_seconds: float) -> None:
    import asyncio

    from polar.errors import LogUnavailableError
    from polar.kafka.topics import ensure_topics

    deadline = asyncio.get_running_loop().time() + wait_seconds
    while True:
        try:
            await ensure_topics(settings, replication=replication)
        except LogUnavailableError:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.5)
        else:
            return
