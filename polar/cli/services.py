"""The services that are one coroutine each: `polar gateway`, `node`, `stitcher` and so on.

Named by string and imported when started: parsing stays cheap, and polar never imports streams.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polar.cli.running import run_service
from polar.settings import (
    BrokerSettings,
    EngineSettings,
    GatewaySettings,
    LogSettings,
    NodeSettings,
    PackerSettings,
    SchedulerSettings,
    StreamSettings,
    WeightSyncSettings,
)


@dataclass(frozen=True, slots=True)
class Service:
    """One service command."""

    name: str
    entry: str
    """`module:function`. A stream's function returns an app, any other one is the service."""
    settings: tuple[type[Any], ...]
    """Made from the environment and handed to the function in this order."""
    does: str
    is_stream: bool = False

    def help_text(self) -> str:
        """What it does and the environment variables that it reads."""
        names = [
            f"{kind.model_config['env_prefix']}{field}".upper()
            for kind in self.settings
            for field in kind.model_fields
        ]
        return f"{self.does}\n\nEnvironment: {', '.join(names)}."

    def load(self) -> Callable[..., Any]:
        """The function behind `entry`."""
        module, _, function = self.entry.partition(":")
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return loaded

    def command(self) -> Callable[[], None]:
        """The typer command."""

        def run() -> None:
            from polar.settings import ProcessSettings
            from polar.telemetry.logs import configure
            from polar.telemetry.metrics import serve_metrics

            settings = [kind() for kind in self.settings]
            configure(self.name)
            serve_metrics(self.name, ProcessSettings())
            start = self.load()
            if self.is_stream:
                run_service(_run_stage(start(*settings)))
                return
            result = start(*settings)
            if inspect.isawaitable(result):
                run_service(_as_coroutine(result))

        run.__name__ = self.name.replace("-", "_")
        return run


async def _run_stage(app: Any) -> None:
    from polar.kafka.stage import run_stage
    from polar.telemetry.metrics import expose

    expose(app.stage.metrics)
    await run_stage(app)


async def _as_coroutine(awaitable: Any) -> None:
    await awaitable


SERVICES: tuple[Service, ...] = (
    Service(
        "broker", "polar.kafka.brokers:serve", (LogSettings, BrokerSettings),
        "Run the embedded broker, or one node of an unpacked Apache Kafka, on loopback.",
    ),
    Service(
        "gateway", "polar.gateway.app:serve", (LogSettings, GatewaySettings),
        "Stand between harness and engine; record every call.",
    ),
    Service(
        "scheduler", "streams.scheduler:create_app", (LogSettings, SchedulerSettings),
        "Accept tasks over HTTP, place sessions on nodes, fix the members of groups.", is_stream=True,
    ),
    Service(
        "node", "polar.rollout.node:serve", (LogSettings, NodeSettings),
        "Run harnesses in runtimes, seal and evaluate their sessions.",
    ),
    Service(
        "stitcher", "streams.stitcher:create_app", (LogSettings, StreamSettings),
        "Turn the calls of a session into its token-prefix tree.", is_stream=True,
    ),
    Service(
        "grouper", "streams.grouper:create_app", (LogSettings, StreamSettings),
        "Turn trajectories and rewards into one scored tree a group.", is_stream=True,
    ),
    Service(
        "packer", "streams.packer:create_app", (LogSettings, PackerSettings),
        "Turn scored groups into batches of packed rows.", is_stream=True,
    ),
    Service(
        "weight-sync", "polar.weightsync.loop:serve", (LogSettings, WeightSyncSettings),
        "Load published weights into the engines and tell the gateways.",
    ),
    Service(
        "engine", "polar.engines.vllm_server:serve", (EngineSettings,),
        "Start a vLLM server with the settings that the records claim.",
    ),
)  # fmt: skip
