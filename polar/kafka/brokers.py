"""Three ways to a broker: embedded, an Apache Kafka that polar runs, any other Kafka.

    broker = open_broker("embedded", data_dir, port=19092)
    broker.start()                  # blocks; asyncio.to_thread(broker.start) in an event loop
    settings = LogSettings(bootstrap_servers=broker.bootstrap_servers, …)
    log_capabilities(await broker.capabilities())
    broker.stop()

A restart on the same data directory serves every record and offset that was acknowledged.
"""

import asyncio
import logging
import signal
from pathlib import Path
from typing import Protocol

from polar.errors import SettingsError
from polar.kafka.apache import kafka_children
from polar.kafka.capabilities import Capabilities, log_capabilities, probe
from polar.kafka.children import Children
from polar.kafka.embedded import embedded_children
from polar.kafka.topics import ensure_topics
from polar.settings import BrokerKind, BrokerSettings, LogSettings
from polar.supervision.ports import is_free

logger = logging.getLogger(__name__)


class BrokerProcess(Protocol):
    """A broker that may have processes of its own."""

    @property
    def bootstrap_servers(self) -> str:
        """host:port list for clients."""

    @property
    def pids(self) -> dict[str, int]:
        """Pids of its programs by name; empty for an external broker."""

    def start(self) -> None:
        """Returns when it answers. Raises LogError or SettingsError."""

    def stop(self) -> None:
        """End its processes."""

    async def capabilities(self) -> Capabilities:
        """What it can do; see polar.kafka.capabilities."""


class OwnBroker:
    """A broker whose processes belong to this one: restarted when they die, ended with it."""

    def __init__(self, kind: BrokerKind, directory: Path, port: int, kafka_home: Path | None) -> None:
        self._kind = kind
        self._directory = directory
        self._port = port
        self._kafka_home = kafka_home
        self._children: Children | None = None

    @property
    def bootstrap_servers(self) -> str:
        """Loopback only."""
        return f"127.0.0.1:{self._port}"

    @property
    def pids(self) -> dict[str, int]:
        """Pids by program: `object-store` and `broker`, or `kafka`."""
        return self._children.pids if self._children else {}

    @property
    def restarts(self) -> int:
        """How often a program died and was started again."""
        return self._children.restarts if self._children else 0

    def start(self) -> None:
        """Returns when it answers. Raises LogError with the log's tail, SettingsError."""
        if not is_free(self._port):
            raise SettingsError(
                f"port {self._port} on 127.0.0.1 is taken; end what listens there or take another port"
            )
        if self._kafka_home is not None:
            self._children = kafka_children(self._directory, self._port, self._kafka_home)
        else:
            self._children = embedded_children(self._directory, self._port)
        self._children.start()

    def stop(self) -> None:
        """End its processes; may be started again."""
        if self._children is not None:
            self._children.stop()
            self._children = None

    async def capabilities(self) -> Capabilities:
        """Known for the embedded broker, measured for Apache Kafka."""
        return await probe(self.bootstrap_servers, self._kind)


class ExternalBroker:
    """Somebody else's Kafka."""

    def __init__(self, servers: str) -> None:
        self._servers = servers

    @property
    def bootstrap_servers(self) -> str:
        """As configured."""
        return self._servers

    @property
    def pids(self) -> dict[str, int]:
        """It has no processes here."""
        return {}

    def start(self) -> None:
        """It runs already."""

    def stop(self) -> None:
        """It stays."""

    async def capabilities(self) -> Capabilities:
        """Measured."""
        return await probe(self.bootstrap_servers, "external")


def open_broker(
    kind: BrokerKind,
    data_dir: Path,
    port: int,
    kafka_home: Path | None = None,
    *,
    bootstrap_servers: str = "",
) -> BrokerProcess:
    """A broker of this kind, not started; its files go to DATA_DIR/broker-<kind>.

    `port` is where it listens on loopback; Kafka takes the port after it too. Raises
    SettingsError when something is missing for this kind.
    """
    if kind == "external":
        if not bootstrap_servers:
            raise SettingsError("an external broker needs --bootstrap-servers HOST:PORT")
        return ExternalBroker(bootstrap_servers)
    if kind == "kafka-home" and kafka_home is None:
        raise SettingsError("--kafka-home needs the folder of an unpacked Apache Kafka")
    directory = data_dir / f"broker-{kind}"
    return OwnBroker(kind, directory, port, kafka_home if kind == "kafka-home" else None)


async def serve(log: LogSettings, settings: BrokerSettings) -> None:
    """`polar broker`: run one until SIGTERM or SIGINT; makes the topics once it is up."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    broker = open_broker(
        settings.kind,
        log.data_dir,
        settings.port,
        settings.kafka_home,
        bootstrap_servers=log.bootstrap_servers,
    )
    try:
        await asyncio.to_thread(broker.start)
        logger.info("broker at %s, pids %s", broker.bootstrap_servers, broker.pids)
        log_capabilities(await broker.capabilities())
        await ensure_topics(log.model_copy(update={"bootstrap_servers": broker.bootstrap_servers}))
        await stopping.wait()
    finally:
        await asyncio.to_thread(broker.stop)
