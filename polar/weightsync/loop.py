"""weight-sync: every engine runs the newest published policy, and everybody knows which one.

    POLICIES ─▶ Board ─▶ one worker per engine ─▶ EngineSync ─▶ ENGINES
    NODES (heartbeats) ─▶ Gateways ◀── told by EngineSync

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| reader | policies, heartbeats | the log | new records |
| worker | the newest policy | its engine, the gateways | a newer policy, a poll every two seconds |

Invariant: only the newest policy counts; versions published meanwhile are skipped. One engine
that fails holds up none of the others.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine

from polar.core.session_keys import admin_token
from polar.errors import EngineError, GatewayError, LogError, SettingsError
from polar.kafka.reader import end_offsets, follow
from polar.kafka.writer import LogWriter
from polar.secret import load_secret
from polar.settings import LogSettings, WeightSyncSettings, engine_urls
from polar.weightsync.board import Board
from polar.weightsync.engine_client import EngineClient, EngineDownError
from polar.weightsync.engine_sync import EngineSync
from polar.weightsync.gateways import Gateways
from schemas.engines import EngineState
from schemas.nodes import GatewayHeartbeat
from schemas.policies import PolicyPublished
from schemas.topics import NODES, POLICIES

logger = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
"""How soon an engine that was restarted with its base weights is noticed."""
_LONGEST_BACKOFF_SECONDS = 30.0
_STOP_SECONDS = 10.0
_HEARTBEATS_READ = 5000
"""At start: enough for one of every gateway that is alive, without reading a topic of weeks."""


async def serve(log: LogSettings, settings: WeightSyncSettings) -> None:
    """Run until cancelled. Raises SettingsError for a wrong `engines` setting."""
    try:
        urls = engine_urls(settings.engines)
    except ValueError as error:
        raise SettingsError(f"POLAR_WEIGHT_SYNC_ENGINES: {error}") from error
    gateways = Gateways(
        settings.gateways, admin_token(load_secret(log)), timeout_seconds=settings.timeout_seconds
    )
    board = Board(settings.policy)
    async with contextlib.AsyncExitStack() as stack:
        writer = await stack.enter_async_context(LogWriter(log))
        stack.push_async_callback(gateways.close)

        async def publish(state: EngineState) -> None:
            await writer.write(state)

        syncs = []
        for engine_id, url in urls.items():
            engine = EngineClient(engine_id, url, timeout_seconds=settings.timeout_seconds)
            stack.push_async_callback(engine.close)
            syncs.append(EngineSync(engine, gateways, publish, policy=settings.policy, digests=board.digests))
        # Entered last: the stack unwinds backwards, and the clients must outlive the tasks.
        group = await stack.enter_async_context(asyncio.TaskGroup())
        group.create_task(_read(log, board, gateways))
        for sync in syncs:
            group.create_task(keep_current(sync, board))


async def keep_current(sync: EngineSync, board: Board, *, poll_seconds: float = _POLL_SECONDS) -> None:
    """Bring one engine to the newest policy, again and again."""
    backoff = poll_seconds
    while True:
        target = await board.newest()
        wait = poll_seconds
        try:
            await _to_its_end(sync.bring_to(target))
            backoff = poll_seconds
        except EngineDownError as error:
            # It comes back with its base weights; notice that soon.
            await _failed(sync, error)
        except (EngineError, GatewayError) as error:
            await _failed(sync, error)
            wait, backoff = backoff, min(2 * backoff, _LONGEST_BACKOFF_SECONDS)
        except LogError as error:
            logger.warning("the state of engine %s is not on the log yet: %s", sync.engine.engine_id, error)
        await board.wait_for_newer(target, timeout_seconds=wait)


async def _to_its_end(step: Coroutine[None, None, None]) -> None:
    """Await it; when cancelled, give it some time first: a step cut short leaves an engine paused."""
    task = asyncio.ensure_future(step)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=_STOP_SECONDS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


async def _failed(sync: EngineSync, error: Exception) -> None:
    logger.warning("%s", error)
    try:
        await sync.report_failure(str(error))
    except LogError as trouble:
        logger.warning("this is not on the log: %s", trouble)


async def _read(log: LogSettings, board: Board, gateways: Gateways) -> None:
    ends = {**await end_offsets(log, POLICIES), **await end_offsets(log, NODES)}
    start = {
        partition: max(0, end - _HEARTBEATS_READ) if partition.topic == NODES.suffix else 0
        for partition, end in ends.items()
    }
    behind = {partition for partition, end in ends.items() if end > start[partition]}
    if not behind:
        board.open()
    async for record in follow(log, POLICIES, NODES, start=start):
        if isinstance(record.event, PolicyPublished):
            board.put(record.event)
        elif isinstance(record.event, GatewayHeartbeat):
            gateways.hear(record.event)
        if record.partition in behind and record.offset + 1 >= ends[record.partition]:
            behind.discard(record.partition)
            if not behind:
                board.open()
