"""A stage core as a FastStream app: one batch subscriber over all its topics.

The work is done by `polar.kafka.driver.Stage`; this module binds it to FastStream and to the
life of the process.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from aiokafka import ConsumerRebalanceListener, TopicPartition
from faststream import AckPolicy, FastStream
from faststream.kafka import KafkaBroker
from faststream.kafka.message import FAKE_CONSUMER, KafkaMessage

from polar.core.stage import StageCore
from polar.kafka.clients import RETRY_SECONDS, bootstrap_servers, subscriber_options
from polar.kafka.driver import MAX_BATCH_RECORDS, Stage, StageFailedError
from polar.kafka.outages import through_outages
from polar.kafka.topics import missing_topics
from polar.kafka.writer import LogWriter
from polar.settings import LogSettings
from schemas.topics import TopicSpec

__all__ = ["AlsoRun", "StageApp", "StageFailedError", "run_stage", "stage_app"]

logger = logging.getLogger(__name__)

_BATCH_TIMEOUT_MS = 20
"""How long FastStream waits for records, and then again after an empty poll."""

AlsoRun = Callable[[LogWriter], Awaitable[None]]


class StageApp(FastStream):
    """A FastStream app with one subscriber and its stage."""

    stage: Stage


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, stage: Stage, consumer_of: Callable[[], Any]) -> None:
        self._stage = stage
        self._consumer_of = consumer_of

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        try:
            await self._stage.assigned(self._consumer_of(), assigned)
        except Exception as error:  # noqa: BLE001 - aiokafka would swallow it and go on unsought
            self._stage.fail(error)

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        try:
            await self._stage.revoked(revoked)
        except Exception as error:  # noqa: BLE001 - see above
            self._stage.fail(error)


def stage_app(
    settings: LogSettings,
    core: StageCore,
    topics: Sequence[TopicSpec],
    *,
    group_id: str,
    start_at_beginning: Sequence[TopicSpec] = (),
    tick_seconds: float = 1.0,
    also_run: Sequence[AlsoRun] = (),
    in_thread: bool = False,
) -> StageApp:
    """The app of one stage: ONE batch subscriber over all topics, so that the range assignor brings
    equal partitions to the same member. Members of one `group_id` share the partitions; it must differ
    between deployments on one broker. Topics in `start_at_beginning` are read from their first
    record at every start and never committed. `also_run`: tasks beside it, given its writer; one
    that fails ends the app. `in_thread`: the core may work for seconds, see Stage.

    `app.stage.metrics()` are its counters and gauges.
    """
    broker = KafkaBroker(
        bootstrap_servers(settings), client_id=group_id, apply_types=False, allow_auto_create_topics=False,
        consumer_only=True, logger=logger, log_level=logging.DEBUG,  # else two lines a batch
    )  # fmt: skip
    stage = Stage(
        settings,
        core,
        topics,
        name=group_id,
        start_at_beginning=start_at_beginning,
        tick_seconds=tick_seconds,
        in_thread=in_thread,
    )
    subscriber = broker.subscriber(
        *(topic.named(settings.topic_prefix) for topic in topics), group_id=group_id,
        batch=True, max_records=MAX_BATCH_RECORDS, batch_timeout_ms=_BATCH_TIMEOUT_MS,
        ack_policy=AckPolicy.MANUAL, listener=_Listener(stage, lambda: subscriber.consumer),
        parser=_undecoded, decoder=_records, **subscriber_options(settings, group_id),
    )  # fmt: skip
    subscriber(stage.process)
    app = StageApp(broker, logger=logger)
    app.stage = stage
    tasks: list[asyncio.Task[None]] = []

    @app.on_startup
    async def start() -> None:
        await _wait_for_topics(settings, topics)
        await stage.writer.__aenter__()
        running = [stage.tick_for_ever(), _watch(stage, app), *(run(stage.writer) for run in also_run)]
        for coroutine in running:
            task = asyncio.ensure_future(coroutine)
            task.add_done_callback(lambda done: _note_end(done, stage))
            tasks.append(task)

    @app.on_shutdown
    async def leave() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await stage.leave()

    @app.after_shutdown
    async def close() -> None:
        await stage.writer.__aexit__(None, None, None)

    return app


async def run_stage(app: FastStream) -> None:
    """Run until SIGTERM, SIGINT or cancellation. Raises StageFailedError when the stage cannot go on."""
    try:
        await app.run()
    except asyncio.CancelledError:
        await app.stop()
        raise
    failure = app.stage.failure if isinstance(app, StageApp) else None
    if failure is not None:
        raise StageFailedError(f"{type(failure).__name__}: {failure}") from failure


async def _wait_for_topics(settings: LogSettings, topics: Sequence[TopicSpec]) -> None:
    """Until the broker answers and the topics are there. Raises SettingsError on a wrong partition count."""
    while True:
        missing = await through_outages(lambda: missing_topics(settings, topics))
        if not missing:
            return
        logger.warning("waiting for topics to be created: %s", ", ".join(missing))
        await asyncio.sleep(RETRY_SECONDS)


async def _watch(stage: Stage, app: FastStream) -> None:
    """End the app when the stage failed."""
    await stage.failed.wait()
    app.exit()


def _note_end(task: asyncio.Task[None], stage: Stage) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        stage.fail(error)


async def _undecoded(message: Any) -> KafkaMessage:
    """FastStream's own parser fails on header bytes that are no text; ours leaves them alone."""
    return KafkaMessage(body=b"", raw_message=message, consumer=FAKE_CONSUMER)


async def _records(message: KafkaMessage) -> Any:
    return message.raw_message
