"""What `polar up` runs: every service with its environment, its needs and its probe.

A deployment is described by POLAR_* variables alone. They are kept in DATA_DIR/deployment.json,
so that `polar up` on the same data directory is the same deployment again; variables of the
present environment and options go before what was kept.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from polar.supervision.kept import KeptDeployment, keep_deployment, load_deployment
from polar.supervision.ports import reserve_ports
from polar.supervision.processes import MARKER, SERVICE_MARKER
from polar.supervision.supervisor import ServiceSpec

Probe = Callable[[], Awaitable[bool]]

FIXED_PORTS = {"broker": 9092, "gateway": 8700, "scheduler": 8710, "engine": 8600, "relay": 8605}
"""Where services listen unless free ports are asked for."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What a user asked of `polar up`; None: as kept, else the default."""

    data_dir: Path
    """Absolute."""
    kafka_home: Path | None = None
    bootstrap_servers: str | None = None
    model_path: Path | None = None
    free_ports: bool = False
    relay: bool | None = None
    """Put a relay between gateway and engine that keeps raw answers (polar.demo.relay)."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A resolved deployment."""

    data_dir: Path
    broker: str
    """`embedded`, `kafka-home` or `external`."""
    ports: Mapping[str, int]
    env: Mapping[str, str]
    services: tuple[ServiceSpec, ...]

    def summary(self) -> dict[str, object]:
        """What a program needs in order to talk to it."""
        return {
            "data_dir": str(self.data_dir),
            "broker": self.broker,
            "bootstrap_servers": self.env["POLAR_BOOTSTRAP_SERVERS"],
            "rollout_api": f"http://127.0.0.1:{self.ports['scheduler']}",
            "gateway": f"http://127.0.0.1:{self.ports['gateway']}",
            "engine": f"http://127.0.0.1:{self.ports['engine']}",
        }


def resolve(options: UpOptions) -> Deployment:
    """Choose ports, write DATA_DIR/deployment.json, list the services."""
    kept = load_deployment(options.data_dir)
    given = {name: value for name, value in os.environ.items() if name.startswith("POLAR_")}
    external = options.bootstrap_servers or given.get("POLAR_BOOTSTRAP_SERVERS") or ""
    named_home = options.kafka_home or given.get("POLAR_BROKER_KAFKA_HOME")
    kafka_home = str(Path(named_home).absolute()) if named_home else ""
    if not external and not kafka_home:
        external, kafka_home = kept.external, kept.kafka_home
    relay = kept.relay if options.relay is None else options.relay
    names = ["gateway", "scheduler", "engine", *(["relay"] if relay else [])]
    if not external:
        names.insert(0, "broker")
    ports = reserve_ports(options.data_dir, names, fixed=None if options.free_ports else FIXED_PORTS)
    broker = "external" if external else "kafka-home" if kafka_home else "embedded"
    chosen = {**kept.chosen, **given}
    if options.model_path is not None:
        chosen["POLAR_ENGINE_MODEL_PATH"] = chosen["POLAR_TRAINER_MODEL_PATH"] = str(options.model_path)
    chosen["POLAR_DATA_DIR"] = str(options.data_dir)
    chosen["POLAR_BOOTSTRAP_SERVERS"] = external or f"127.0.0.1:{ports['broker']}"
    # The markers of an enclosing deployment are no settings of this one.
    chosen = {name: value for name, value in chosen.items() if name not in {MARKER, SERVICE_MARKER}}
    defaults = _defaults(ports, broker=broker, kafka_home=kafka_home, relay=relay)
    env = {**defaults, **_engine_for_the_gateway(chosen), **chosen}
    keep_deployment(options.data_dir, KeptDeployment(external, kafka_home, relay, chosen, env))
    services = _services(env, ports, relay=relay)
    return Deployment(options.data_dir, broker, ports, env, services)


def _engine_for_the_gateway(chosen: Mapping[str, str]) -> dict[str, str]:
    """The gateway continues prompts with the tokenizer and the template that the engine uses."""
    names = ("MODEL_PATH", "CHAT_TEMPLATE")
    given = {name: chosen.get(f"POLAR_ENGINE_{name}") for name in names}
    return {f"POLAR_GATEWAY_{name}": value for name, value in given.items() if value}


def _defaults(ports: Mapping[str, int], *, broker: str, kafka_home: str, relay: bool) -> dict[str, str]:
    """Defaults of the services' settings in a one-machine deployment."""
    engine = f"http://127.0.0.1:{ports['engine']}"
    behind = f"http://127.0.0.1:{ports['relay']}" if relay else engine
    values = {
        "POLAR_MEMBER_ID": "0",
        "POLAR_FETCH_MAX_WAIT_MS": "200" if broker == "embedded" else "500",
        "POLAR_GATEWAY_PORT": str(ports["gateway"]),
        "POLAR_GATEWAY_ENGINES": f"engine-0={behind}",
        "POLAR_SCHEDULER_PORT": str(ports["scheduler"]),
        # A node that crashes is back in seconds here; a broker that restarts, or a machine whose
        # processors are all busy, must not look like one that is gone.
        "POLAR_SCHEDULER_NODE_TIMEOUT_SECONDS": "60",
        "POLAR_ENGINE_PORT": str(ports["engine"]),
        "POLAR_WEIGHT_SYNC_ENGINES": f"engine-0={behind}",
        "POLAR_WEIGHT_SYNC_GATEWAYS": f"http://127.0.0.1:{ports['gateway']}",
    }
    if "broker" in ports:
        values |= {"POLAR_BROKER_KIND": broker, "POLAR_BROKER_PORT": str(ports["broker"])}
    if kafka_home:
        values["POLAR_BROKER_KAFKA_HOME"] = kafka_home
    return values


def _services(env: Mapping[str, str], ports: Mapping[str, int], *, relay: bool) -> tuple[ServiceSpec, ...]:
    polar = (sys.executable, "-m", "polar.cli.main")
    services: list[ServiceSpec] = []

    def service(
        name: str,
        *needs: str,
        ready: Probe | None = None,
    ) -> ServiceSpec:
        return ServiceSpec(
            name,
            (*polar, name),
            _with_metrics_port(env, len(services)),
            needs=needs,
            is_ready=ready,
            one_shot=name == "topics",
        )

    if "broker" in ports:
        services.append(service("broker", ready=_listens(ports["broker"])))
    services.append(service("topics", *(["broker"] if "broker" in ports else [])))
    services.append(service("engine", ready=_answers(ports["engine"], "/health")))
    behind = "engine"
    if relay:
        behind = "relay"
        engine = f"http://127.0.0.1:{ports['engine']}"
        services.append(
            ServiceSpec(
                "relay",
                (sys.executable, "-m", "polar.demo.relay", "--port", str(ports["relay"]), "--engine", engine),
                env,
                needs=("engine",),
                is_ready=_listens(ports["relay"]),
            )
        )
    services.append(service("gateway", "topics", behind, ready=_answers(ports["gateway"], "/ready")))
    services.append(service("scheduler", "topics", ready=_answers(ports["scheduler"], "/health")))
    services.append(service("node", "topics"))
    services.append(service("stitcher", "topics"))
    services.append(service("grouper", "topics"))
    services.append(service("packer", "topics"))
    services.append(service("trainer", "topics"))
    services.append(service("weight-sync", "topics", behind))
    return tuple(services)


def _with_metrics_port(env: Mapping[str, str], ordinal: int) -> Mapping[str, str]:
    """The environment with a port for /metrics of its own, where metrics are asked for."""
    first = int(env.get("POLAR_METRICS_PORT") or 0)
    return {**env, "POLAR_METRICS_PORT": str(first + ordinal)} if first else env


def _listens(port: int) -> Probe:
    async def probe() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    return probe


def _answers(port: int, path: str) -> Probe:
    """Whether GET answers 200. By hand: probes run while every processor is busy with starting."""

    async def probe() -> bool:
        try:
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode())
                    status_line = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
        return status_line.split()[1:2] == [b"200"]

    return probe
