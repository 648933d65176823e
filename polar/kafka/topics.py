"""Creates the topics of the table. The only place that creates topics."""

import asyncio
import logging
from collections.abc import Sequence

from aiokafka.admin import NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from polar.errors import LogError, SettingsError
from polar.kafka.clients import new_admin, partition_count, retry_until, stop_quietly
from polar.settings import LogSettings
from schemas.topics import TOPICS, TopicSpec

logger = logging.getLogger(__name__)

_VISIBLE_SECONDS = 30.0


async def ensure_topics(settings: LogSettings, *, replication: int = 1) -> None:
    """Create the topics that are missing, with the table's partitions and settings.

    Raises SettingsError when a topic exists with another number of partitions (keys would move),
    LogUnavailableError when no broker answers, LogError when it refuses.
    """
    await retry_until(
        lambda: _ensure(settings, replication), seconds=settings.send_timeout_seconds, what="creating topics"
    )


async def missing_topics(settings: LogSettings, topics: Sequence[TopicSpec] = TOPICS) -> list[str]:
    """Names of those topics that do not exist. Raises like `ensure_topics`."""
    counts = await retry_until(
        lambda: _partition_counts(settings, topics), seconds=settings.send_timeout_seconds, what="topics"
    )
    _check_counts(settings, topics, counts)
    return [name for topic in topics if (name := topic.named(settings.topic_prefix)) not in counts]


async def _ensure(settings: LogSettings, replication: int) -> None:
    counts = await _partition_counts(settings, TOPICS)
    _check_counts(settings, TOPICS, counts)
    missing = [topic for topic in TOPICS if topic.named(settings.topic_prefix) not in counts]
    if not missing:
        return
    admin = new_admin(settings)
    try:
        await admin.start()
        response = await admin.create_topics(
            [
                NewTopic(
                    topic.named(settings.topic_prefix),
                    partition_count(settings, topic),
                    replication,
                    topic_configs=topic.configs(),
                )
                for topic in missing
            ]
        )
    finally:
        await stop_quietly(admin.close)
    for name, code, *message in response.topic_errors:
        error = for_code(code)
        # Another process may have been faster.
        if code and error is not TopicAlreadyExistsError:
            if error.retriable:
                raise error(f"{name}: {message}")
            raise LogError(
                f"the broker refused to create {name}: {error.__name__} {' '.join(map(str, message))}"
            )
    await _wait_visible(settings, missing)
    logger.info("created %d topics under prefix %s", len(missing), settings.topic_prefix)


async def _wait_visible(settings: LogSettings, topics: Sequence[TopicSpec]) -> None:
    """Brokers answer a creation before their metadata show it."""
    async with asyncio.timeout(_VISIBLE_SECONDS):
        while True:
            counts = await _partition_counts(settings, topics)
            if len(counts) == len(topics):
                _check_counts(settings, topics, counts)
                return
            await asyncio.sleep(0.05)


async def _partition_counts(settings: LogSettings, topics: Sequence[TopicSpec]) -> dict[str, int]:
    """Name → partitions of those that exist."""
    admin = new_admin(settings)
    try:
        await admin.start()
        names = [topic.named(settings.topic_prefix) for topic in topics]
        described = await admin.describe_topics(names)
    finally:
        await stop_quietly(admin.close)
    counts = {}
    for item in described:
        if item["error_code"] == 0 and item["partitions"]:
            counts[item["topic"]] = len(item["partitions"])
        elif item["error_code"] not in {0, 3}:
            error = for_code(item["error_code"])
            raise error(item["topic"]) if issubclass(error, KafkaError) else LogError(item["topic"])
    return counts


def _check_counts(settings: LogSettings, topics: Sequence[TopicSpec], counts: dict[str, int]) -> None:
    for topic in topics:
        name, wanted = topic.named(settings.topic_prefix), partition_count(settings, topic)
        if counts.get(name, wanted) != wanted:
            variable = {
                "sessions": "POLAR_SESSION_PARTITIONS",
                "groups": "POLAR_GROUP_PARTITIONS",
                "one": "always 1",
            }[topic.partitions]
            raise SettingsError(
                f"topic {name} has {counts[name]} partitions, this deployment wants {wanted} ({variable}); "
                "partition counts never change: take the old number or another POLAR_TOPIC_PREFIX"
            )
