"""Delivery settings, all of them, in one place.

| what | value | why |
|---|---|---|
| acks | all | an acknowledged record survives |
| idempotence | on; on the embedded broker polar.kafka.verification | retries make no duplicate |
| compression | zstd, level 1 | aiokafka ties lz4 to its slowest level |
| batch size | 1 MiB | a produce request costs the embedded broker 3.6 ms whatever its size |
| linger | none | an answer waits for its record's acknowledgement; what comes meanwhile is gathered anyway |
| request size | largest limit of the topics table | each topic's own limit is checked before a send |
| unacknowledged bytes | 80 MiB a producer | bounds memory, and one request stays below a broker's 100 MiB |
| auto-creation, auto-commit | off | topics come from the table, commits are explicit offset maps |
| offset reset | none | every first position is an explicit seek |
| assignor | range | equal partitions of several topics come to the same member |
| session time-out | 6 s, Kafka's least | joining on the embedded broker takes half of it, or all of it |
| longest poll interval | 1 h | a long step must not cost the membership; heartbeats go on meanwhile |
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import KafkaError

from polar.core.stage import Partition
from polar.errors import LogUnavailableError, SettingsError
from polar.kafka.compat import compress_at_level_one, forbid_auto_creation, hide_init_producer_id_refusals
from polar.settings import LogSettings
from schemas.topics import RECORD_OVERHEAD_BYTES, TOPICS, TopicSpec

CLIENT_ID = "polar"
MAX_UNACKNOWLEDGED_BYTES = 80 * 1024 * 1024
RETRY_SECONDS = 0.5
"""Pause between two attempts to reach a broker that is down."""
_MAX_REQUEST_BYTES = max(topic.max_message_bytes for topic in TOPICS) + RECORD_OVERHEAD_BYTES
_MAX_POLL_INTERVAL_MS = 3_600_000
_SESSION_TIMEOUT_MS = 6_000
_PARTITION_FETCH_BYTES = 8 * 1024 * 1024

Result = TypeVar("Result")

# Before the first client of this process, whoever makes it.
compress_at_level_one()
forbid_auto_creation()
hide_init_producer_id_refusals()


def bootstrap_servers(settings: LogSettings) -> str:
    """The broker's address. Raises SettingsError when none is set."""
    if not settings.bootstrap_servers:
        raise SettingsError(
            "no broker: set POLAR_BOOTSTRAP_SERVERS to HOST:PORT of a Kafka broker, or start everything "
            "with `polar up`, which brings its own"
        )
    return settings.bootstrap_servers


def new_producer(settings: LogSettings, *, idempotent: bool = True) -> AIOKafkaProducer:
    """A producer, not started. Needs a running event loop.

    Without idempotence it must be given to polar.kafka.verification before it is used.
    """
    return AIOKafkaProducer(
        bootstrap_servers=bootstrap_servers(settings),
        client_id=CLIENT_ID,
        acks="all",
        enable_idempotence=idempotent,
        compression_type="zstd",
        max_batch_size=1024 * 1024,
        max_request_size=_MAX_REQUEST_BYTES,
        linger_ms=0,
        request_timeout_ms=max(1000, int(settings.send_timeout_seconds * 1000)),
    )


def new_consumer(settings: LogSettings, *, fetch_max_wait_ms: int | None = None) -> AIOKafkaConsumer:
    """A consumer without group and without topics, not started. Needs a running event loop."""
    return AIOKafkaConsumer(
        bootstrap_servers=bootstrap_servers(settings),
        client_id=CLIENT_ID,
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="none",
        fetch_max_wait_ms=settings.fetch_max_wait_ms if fetch_max_wait_ms is None else fetch_max_wait_ms,
        max_partition_fetch_bytes=_PARTITION_FETCH_BYTES,
    )


def new_admin(settings: LogSettings) -> AIOKafkaAdminClient:
    """An admin client, not started. Needs a running event loop."""
    return AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers(settings), client_id=CLIENT_ID)


def subscriber_options(settings: LogSettings, group_id: str) -> dict[str, Any]:
    """Consumer options of a stage's one FastStream subscriber."""
    return {
        "group_instance_id": f"{group_id}-{settings.member_id}" if settings.member_id else None,
        "auto_offset_reset": "none",
        "partition_assignment_strategy": (RangePartitionAssignor,),
        "fetch_max_wait_ms": settings.fetch_max_wait_ms,
        "max_partition_fetch_bytes": _PARTITION_FETCH_BYTES,
        "max_poll_interval_ms": _MAX_POLL_INTERVAL_MS,
        "session_timeout_ms": _SESSION_TIMEOUT_MS,
        "heartbeat_interval_ms": 1_000,
    }


def to_kafka(settings: LogSettings, partition: Partition) -> TopicPartition:
    """Partition of a core → partition of the broker (with the deployment's prefix)."""
    return TopicPartition(f"{settings.topic_prefix}.{partition.topic}", partition.number)


def from_kafka(settings: LogSettings, partition: TopicPartition) -> Partition:
    """Partition of the broker → partition of a core."""
    return Partition(partition.topic.removeprefix(f"{settings.topic_prefix}."), partition.partition)


def partition_count(settings: LogSettings, topic: TopicSpec) -> int:
    """Partitions of a topic in this deployment."""
    return topic.num_partitions(settings.session_partitions, settings.group_partitions)


async def stop_quietly(stop: Callable[[], Awaitable[None]], seconds: float = 5.0) -> bool:
    """Stop a client; False when it did not end in `seconds`, as aiokafka may wait for a dead broker."""
    task = asyncio.ensure_future(stop())
    _, pending = await asyncio.wait({task}, timeout=seconds)
    if pending:
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)
        return False
    if not task.cancelled():
        task.exception()  # retrieved: a client that cannot say goodbye is gone all the same
    return True


async def close_producer(producer: AIOKafkaProducer) -> None:
    """Flush and stop a producer; when the broker is away drop what it still holds."""
    if not await stop_quietly(producer.stop):
        # stop() waits for a flush that cannot end; what it would do afterwards.
        await stop_quietly(producer._sender.close)  # noqa: SLF001
        await stop_quietly(producer.client.close)


async def retry_until(attempt: Callable[[], Awaitable[Result]], *, seconds: float, what: str) -> Result:
    """Repeat an attempt on KafkaError for `seconds`. Raises LogUnavailableError at the end."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await asyncio.wait_for(attempt(), max(0.05, deadline - time.monotonic()))
        except (KafkaError, TimeoutError, OSError) as error:
            if time.monotonic() + RETRY_SECONDS >= deadline:
                raise LogUnavailableError(
                    f"{what}: no answer from the broker within {seconds:g} s ({error!r}); is it running?"
                ) from error
            await asyncio.sleep(RETRY_SECONDS)
