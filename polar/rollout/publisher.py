"""Events of a node on the log, whatever the broker does meanwhile."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from polar.core.stage import Emit, Partition
from polar.errors import LogUnavailableError
from schemas.base import Event

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0


class EventWriter(Protocol):
    """The part of polar.kafka.writer.LogWriter that a node needs."""

    async def write_many(self, events: Sequence[Emit]) -> list[tuple[Partition, int]]:
        """All acknowledged, in order. Raises LogUnavailableError."""


class Publisher:
    """Writes until it is acknowledged; an outage delays a session and loses nothing of it."""

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer

    async def publish(self, *events: Event) -> None:
        """All are on the log afterwards. Raises RecordTooLargeError."""
        while events:
            try:
                await self._writer.write_many([Emit(event) for event in events])
            except LogUnavailableError as error:
                logger.warning("%s is written again: %s", events[0].type, error)
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                return
