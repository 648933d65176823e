"""What of aiokafka 0.14 has to be changed for both kinds of broker. Nothing else patches a library.

1. Auto-creation. aiokafka's metadata requests ask for a missing topic to be created, which the
   embedded broker does, with four partitions, and so does an Apache Kafka left at its defaults.
   `forbid_auto_creation` makes them say no: topics come from the table alone.

2. Noise. A producer that asks the embedded broker for an id is refused (polar.kafka.verification
   says why that is just as well); aiokafka logs it as an error although it is handled.

3. zstd's level. aiokafka compresses at level 3 on the event loop, without a way to choose;
   level 1 takes two thirds of the time and 4 to 8 % more bytes. And it makes new tables for each
   batch, where a compressor that is kept has them already.

InitProducerId version 3, which the embedded broker would take, is deliberately not taught to
aiokafka: with it records that were acknowledged are lost, see polar.kafka.verification.
"""

import logging
import sys
import threading
from typing import Any

import zstandard
from aiokafka.protocol import metadata
from aiokafka.record.default_records import DefaultRecordBatchBuilder

_REFUSAL = "Unexpected error during InitProducerIdRequest"


def forbid_auto_creation() -> None:
    """Let no metadata request create a topic, whatever the broker allows. Idempotent."""
    request = metadata.MetadataRequest
    if getattr(request, "_polar_no_creation", False):
        return
    create = request.__init__

    def without_creation(self: Any, topics: Any = None, allow_auto_topic_creation: Any = None) -> None:
        create(self, topics, bool(allow_auto_topic_creation))

    request.__init__ = without_creation
    request._polar_no_creation = True  # noqa: SLF001


def compress_at_level_one() -> None:
    """Let zstd batches be made at level 1. Idempotent."""
    # The compiled module where there is one, else the one in Python.
    module: Any = sys.modules[DefaultRecordBatchBuilder.__module__]
    module.zstd_encode = _zstd_level_one


class _Kept(threading.local):
    """A compressor serves one thread at a time."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)


_kept = _Kept()


def _zstd_level_one(payload: Any) -> bytes:
    compressed: bytes = _kept.compressor.compress(payload)
    return compressed


def hide_init_producer_id_refusals() -> None:
    """Drop the log line of point 2. Idempotent."""
    library_logger = logging.getLogger("aiokafka.producer.sender")
    if not any(isinstance(item, _RefusalFilter) for item in library_logger.filters):
        library_logger.addFilter(_RefusalFilter())


class _RefusalFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_REFUSAL)
