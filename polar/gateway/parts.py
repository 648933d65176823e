"""The parts of one gateway, put together and taken apart in the right order.

Start: spool → records of calls that died with the last process → sender, engines, heartbeat.
Stop: no more requests (the server's job) → spool to the broker as far as it answers → close.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from polar.core.metrics import Metrics
from polar.errors import LogError, SettingsError
from polar.gateway.adapters import new_adapter
from polar.gateway.continuity_rows import ContinuityRows
from polar.gateway.drains import Drains
from polar.gateway.engine import EngineClient, EngineHttp
from polar.gateway.engines import EnginePool
from polar.gateway.garbage import sweep_when_idle
from polar.gateway.prompts import Prompts
from polar.gateway.proxy import ModelProxy
from polar.gateway.recorder import Recorder
from polar.gateway.renderer import RendererError, load_renderer
from polar.gateway.retries import Retries
from polar.gateway.sender import SpoolSender, WriterFactory
from polar.gateway.sessions import SessionTable
from polar.gateway.spool import Spool
from polar.secret import load_engine_key
from polar.settings import GatewaySettings, LogSettings, engine_urls
from schemas.nodes import GatewayHeartbeat

logger = logging.getLogger(__name__)

_PURGE_SECONDS = 60.0
_HEARTBEAT_SECONDS = 1.0


@dataclass(slots=True)
class Parts:
    """One running gateway."""

    log: LogSettings
    settings: GatewaySettings
    spool: Spool
    sender: SpoolSender
    sessions: SessionTable
    engines: EnginePool
    drains: Drains
    recorder: Recorder
    retries: Retries
    prompts: Prompts
    proxy: ModelProxy
    background: list[asyncio.Task[None]] = field(default_factory=list)
    """Sender, engine watch, heartbeat, purge, garbage: none of them ends while the gateway runs."""
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))
    """New at each start of the process."""

    @property
    def url(self) -> str:
        """Where nodes and harnesses reach it."""
        return self.settings.public_url or f"http://{self.settings.host}:{self.settings.port}"

    def metrics(self) -> Metrics:
        """See polar.core.metrics."""
        return {
            "open_sessions": self.spool.num_open,
            "calls_in_flight": self.sessions.num_in_flight,
            "spool_records": self.spool.num_records,
            "spool_bytes": self.spool.size_bytes,
            "refused_records_total": self.sender.refused,
            "durable_records_by_arrival_total": self.sender.durable_by,
            "is_ready": self.trouble is None,
            "records_by_fate_total": self.recorder.counters,
            "refusals_by_status_total": {str(status): n for status, n in self.proxy.refusals.items()},
            "calls_waiting_for_engine": self.engines.num_waiting,
            "calls_by_engine": {slot.engine_id: slot.in_flight for slot in self.engines.slots.values()},
            "engines_fit": sum(not slot.reason for slot in self.engines.slots.values()),
            "engines_behind": sum(map(self.engines.is_behind, self.engines.slots.values())),
            "capture_alarms_total": sum(slot.capture_alarms for slot in self.engines.slots.values()),
            "kept_answers": self.retries.num_kept,
            "kept_answer_bytes": self.retries.kept_bytes,
            "joined_requests_total": self.retries.num_joined,
            "repeated_answers_total": self.retries.num_repeated,
            "keep_alives_total": self.proxy.keep_alives,
            "engines_taking_ids": sum(not (s.reason or s.rendering) for s in self.engines.slots.values()),
            "calls_by_relation_total": self.prompts.relations,
            "prompts_by_rendering_total": self.prompts.renderings,
            "engine_prompts_by_reason_total": self.prompts.engine_reasons,
            "forgotten_calls_total": self.prompts.forgotten,
            "cut_tokens_total": self.prompts.cut_tokens,
            "calls_without_ids_total": self.sessions.num_lost_ids,
            "history_bytes": self.sessions.history_bytes,
        }

    @property
    def trouble(self) -> tuple[str, str] | None:
        """(reason, detail) while the gateway should get no new sessions."""
        if self.engines.trouble is not None:
            return self.engines.trouble
        if self.spool.size_bytes >= self.settings.spool_max_bytes:
            return "spool_full", f"{self.spool.num_records} records wait for the broker"
        if self.sender.trouble:
            return "broker_down", self.sender.trouble
        return None


@asynccontextmanager
async def running_parts(
    log: LogSettings, settings: GatewaySettings, secret: bytes, new_writer: WriterFactory
) -> AsyncIterator[Parts]:
    """The parts with their background tasks, until the block ends. Raises SettingsError."""
    http = EngineHttp()
    try:
        clients = _clients(settings, http)
    except SettingsError:
        await http.close()
        raise
    folder = log.data_dir / "gateway" / settings.id
    spool = Spool(folder)
    rows = ContinuityRows(folder / "continuity")
    try:
        sender = SpoolSender(spool, new_writer)
        sessions = SessionTable(spool, rows, settings.id, settings.history_max_bytes)
        sessions.recover("gateway restarted")
        prompts = await _prompts(settings)
        engines = EnginePool(
            [
                new_adapter(settings.engine_kind, client, settings.model, prompts.renderer)
                for client in clients
            ],
            probe_seconds=settings.probe_seconds,
            wait_seconds=settings.engine_wait_seconds,
        )
        drains = Drains(folder / "drains.json", engines)
        recorder = Recorder(
            sessions, sender, prompts, settings.broker_grace_ms / 1000,
            tries_disk=settings.durable_on == "disk_or_log",
        )  # fmt: skip
        retries = Retries(settings.retry_max_bytes, settings.retry_seconds)
        proxy = ModelProxy(settings, secret, spool, sessions, engines, recorder, retries, prompts)
        parts = Parts(
            log, settings, spool, sender, sessions, engines, drains, recorder, retries, prompts, proxy
        )
        parts.background = tasks = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("spool-sender", sender.run()),
                ("engine-watch", engines.run()),
                ("heartbeat", _beat(parts)),
                ("purge", _purge(sessions)),
                ("garbage", sweep_when_idle(lambda: sessions.num_in_flight == 0)),
            )
        ]
        try:
            yield parts
            await _flush(parts)
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    logger.error("a background task of the gateway failed", exc_info=outcome)
    finally:
        await http.close()
        rows.close()
        spool.close()


def _clients(settings: GatewaySettings, http: EngineHttp) -> list[EngineClient]:
    """Of the engines that settings name. Raises SettingsError."""
    api_key = load_engine_key(settings.engine_key_file)
    try:
        clients = [
            EngineClient(name, url, http, api_key=api_key, reasoning_field=settings.reasoning_field)
            for name, url in engine_urls(settings.engines).items()
        ]
    except ValueError as error:
        raise SettingsError(f"POLAR_GATEWAY_ENGINES: {error}") from error
    if not clients:
        raise SettingsError("POLAR_GATEWAY_ENGINES names no engine; give the base URL of a vLLM server")
    return clients


async def _prompts(settings: GatewaySettings) -> Prompts:
    """With the engines' template and tokenizer; without them engines render every prompt."""
    if settings.model_path is None:
        trouble = "POLAR_GATEWAY_MODEL_PATH is not set"
        logger.info("engines render every prompt themselves: %s", trouble)
        return Prompts(None, settings.thinking, trouble)
    try:
        renderer = await asyncio.to_thread(
            load_renderer,
            settings.model_path,
            settings.chat_template,
            protects=settings.protect_special_tokens,
        )
    except RendererError as error:
        logger.warning("engines render every prompt themselves: %s", error)
        return Prompts(None, settings.thinking, str(error))
    return Prompts(renderer, settings.thinking)


async def _flush(parts: Parts) -> None:
    """Give the broker a last chance; what it does not take stays spooled, fsynced."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(parts.sender.drained(), parts.settings.shutdown_wait_seconds)
    await asyncio.to_thread(parts.spool.fsync)
    if parts.spool.num_records:
        logger.warning("%s records stay in the spool for the next start", parts.spool.num_records)


async def _beat(parts: Parts) -> None:
    """Tell where the gateway is and how it is; a lost heartbeat is only late."""
    seq = 0
    while True:
        seq += 1
        trouble = parts.trouble
        heartbeat = GatewayHeartbeat(
            gateway_id=parts.settings.id,
            incarnation=parts.incarnation,
            seq=seq,
            url=parts.url,
            open_sessions=parts.spool.num_open,
            in_flight=parts.sessions.num_in_flight,
            spool_records=parts.spool.num_records,
            ready=trouble is None,
            reason="" if trouble is None else f"{trouble[0]}: {trouble[1]}",
        )
        with contextlib.suppress(LogError):
            await parts.sender.write_aside(heartbeat)
        await asyncio.sleep(_HEARTBEAT_SECONDS)


async def _purge(sessions: SessionTable) -> None:
    while True:
        if forgotten := sessions.purge(time.time()):
            logger.info("forgot %s sessions whose keys expired", forgotten)
        await asyncio.sleep(_PURGE_SECONDS)
