"""Records as bytes, and their way to a decoded LogRecord."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polar.core.stage import LogRecord, Partition
from schemas.codec import decode
from schemas.topics import TopicSpec


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record as it stands on the log, not decoded."""

    partition: Partition
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, str] = field(default_factory=dict)
    timestamp_ms: int = 0
    """The broker's time where the topic uses it; for people, never for decisions."""


def raw_record(partition: Partition, record: Any) -> RawRecord:
    """From aiokafka's ConsumerRecord. Never fails: odd header bytes are replaced."""
    headers = {str(name): (value or b"").decode(errors="replace") for name, value in record.headers}
    return RawRecord(partition, record.offset, record.key, record.value, headers, record.timestamp)


def decode_record(raw: RawRecord, topic: TopicSpec) -> LogRecord:
    """Raises schemas.codec.UnreadableRecordError."""
    event = decode(raw.value, topic)
    return LogRecord(raw.partition, raw.offset, (raw.key or b"").decode(errors="replace"), event, raw.headers)
