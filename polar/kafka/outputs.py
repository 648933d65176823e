"""What a core returned → the log, in order and acknowledged."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from polar.core.stage import DeadLettered, Emit, Output, Partition
from polar.errors import RecordTooLargeError
from polar.kafka.outages import through_outages
from polar.kafka.records import RawRecord
from polar.kafka.writer import LogWriter
from schemas.base import encode
from schemas.dead_letters import DeadLetter
from schemas.topics import TOPIC_OF

logger = logging.getLogger(__name__)


class OutputPublisher:
    """Publishes until acknowledged: while the broker is away the stage waits, nothing is skipped."""

    def __init__(self, writer: LogWriter, stage: str, counts: Counter[str]) -> None:
        self._writer = writer
        self._stage = stage
        self._counts = counts

    async def publish(
        self, outputs: Sequence[Output], raws: Mapping[tuple[Partition, int], RawRecord]
    ) -> None:
        """Write outputs in order. `raws`: the records of this batch as they came."""
        pending: list[Emit] = []
        for output in outputs:
            if isinstance(output, Emit):
                pending.append(output)
                continue
            await self._emit(pending)
            pending = []
            self._counts["refused"] += 1
            record = output.record
            raw = raws.get((record.partition, record.offset)) or _raw_again(output)
            await self.refuse(raw, output.reason, output.detail)
        await self._emit(pending)

    async def refuse(self, raw: RawRecord, reason: str, detail: str) -> None:
        """List a record among the dead letters, as it came."""
        letter = DeadLetter(
            source_topic=raw.partition.topic,
            source_partition=raw.partition.number,
            source_offset=raw.offset,
            stage=self._stage,
            reason=reason,
            detail=detail[:2000],
        )
        logger.warning(
            "dead letter %s: %s/%d@%d %s",
            reason, raw.partition.topic, raw.partition.number, raw.offset, detail,
        )  # fmt: skip
        await through_outages(lambda: self._writer.write_dead_letter(letter, raw.key, raw.value))

    async def _emit(self, emits: Sequence[Emit]) -> None:
        if not emits:
            return
        try:
            await through_outages(lambda: self._writer.write_many(emits))
        except RecordTooLargeError as error:
            await self._emit_singly(emits, error)
        else:
            self._counts["outputs"] += len(emits)

    async def _emit_singly(self, emits: Sequence[Emit], error: RecordTooLargeError) -> None:
        """One output is over its topic's limit: the others still leave, it is listed with the reason."""
        if len(emits) > 1:
            for emit in emits:
                await self._emit([emit])
            return
        event = emits[0].event
        topic = TOPIC_OF[type(event)]
        self._counts["too_large"] += 1
        logger.error("%s was not written: %s", type(event).__name__, error)
        # It has no place on the log, hence no coordinates.
        unwritten = RawRecord(
            Partition(topic.suffix, -1), -1, topic.key_of(event).encode(), encode(event), emits[0].headers
        )
        await self.refuse(unwritten, "too_large", str(error))


def _raw_again(output: DeadLettered) -> RawRecord:
    """The bytes of a record that came in an earlier batch; an encoding is a function of its value."""
    record = output.record
    return RawRecord(
        record.partition, record.offset, record.key.encode(), encode(record.event), record.headers
    )
