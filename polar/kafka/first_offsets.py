"""The first start of a consumer group: its first positions are written down explicitly.

With `auto_offset_reset="none"` a group without committed offsets has no position at all, and the
client reports that before the stage had time to seek. So the beginning of every partition is
committed once, before the first member joins.
"""

import logging
from collections.abc import Mapping

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from polar.core.stage import Partition
from polar.kafka.clients import bootstrap_servers, stop_quietly, to_kafka
from polar.settings import LogSettings

logger = logging.getLogger(__name__)


async def commit_first_offsets(
    settings: LogSettings, group_id: str, ranges: Mapping[Partition, tuple[int, int]]
) -> None:
    """Commit the beginning of partitions for which the group has no offset yet.

    A group with members refuses a commit from outside; its members have positions by then.
    """
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap_servers(settings), group_id=group_id, enable_auto_commit=False
    )
    try:
        await consumer.start()
        consumer.assign([to_kafka(settings, partition) for partition in ranges])
        missing = {
            tp: OffsetAndMetadata(first, "")
            for partition, (first, _) in ranges.items()
            if await consumer.committed(tp := to_kafka(settings, partition)) is None
        }
        if missing:
            await consumer.commit(missing)
    except KafkaError as error:
        logger.warning("first offsets of %s were not committed: %r", group_id, error)
    finally:
        await stop_quietly(consumer.stop)
