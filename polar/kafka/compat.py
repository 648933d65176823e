"""What of aiokafka 0.14 has to be changed for both kinds of broker. Nothing else patches a library.

1. Auto-creation. aiokafka's metadata requests ask for a missing topic to be created, which the
   embedded broker does, with four partitions, and so does an Apache Kafka left at its defaults.
   `forbid_auto_creation` makes them say no: topics come from the table alone.

2. Noise. A producer that asks the embedded broker for an id is refused (polar.kafka.verification
   says why that is just as well); aiokafka logs it as an error although it is handled.

InitProducerId version 3, which the embedded broker would take, is deliberately not taught to
aiokafka: with it records that were acknowledged are lost, see polar.kafka.verification.
"""

import logging
from typing import Any

from aiokafka.protocol import metadata

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


def hide_init_producer_id_refusals() -> None:
    """Drop the log line of point 2. Idempotent."""
    library_logger = logging.getLogger("aiokafka.producer.sender")
    if not any(isinstance(item, _RefusalFilter) for item in library_logger.filters):
        library_logger.addFilter(_RefusalFilter())


class _RefusalFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_REFUSAL)
