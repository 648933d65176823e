"""Events of a node on the log, whatever the broker does meanwhile."""

from collections.abc import Sequence
from typing import Protocol

from polar.core.stage import Emit, Partition
from polar.kafka.outages import through_outages
from schemas.base import Event


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
        if events:
            await through_outages(lambda: self._writer.write_many([Emit(event) for event in events]))
