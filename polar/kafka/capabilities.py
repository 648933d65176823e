"""What a broker can do, asked at start and said aloud.

A broker that offers neither AlterConfigs nor CreatePartitions is the embedded one (or its like):
then the gaps measured on it are assumed. Everything in polar works without them, see `remedy`.
"""

import asyncio
import logging
import struct
from dataclasses import dataclass, fields

from polar.errors import LogUnavailableError
from polar.settings import BrokerKind

logger = logging.getLogger(__name__)

_API_VERSIONS = 18
_ALTER_CONFIGS = 33
_CREATE_PARTITIONS = 37
_TIMEOUT_SECONDS = 10.0

_REMEDIES = {
    "end_offsets": "polar reads the high watermark of a fetch",
    "size_limit": "polar checks every record before it is sent",
    "retention": "its disk space grows until the data directory of the run is removed",
    "compaction": "readers of compacted topics see every value, not only the last of a key",
    "transaction_abort": "polar uses no transactions",
    "wakes_long_poll": "polar up fetches with short waits",
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """True where the broker does what Kafka does."""

    kind: BrokerKind
    end_offsets: bool
    """ListOffsets tells the true end of a partition."""
    size_limit: bool
    """max.message.bytes is enforced."""
    retention: bool
    """Old records are deleted as the topic says."""
    compaction: bool
    """Old values of a key are dropped as the topic says."""
    transaction_abort: bool
    """Aborted records stay hidden from readers of committed ones."""
    wakes_long_poll: bool
    """A fetch that waits is answered when a record arrives."""

    @property
    def missing(self) -> list[str]:
        """Names of what it cannot do."""
        return [item.name for item in fields(self) if item.name != "kind" and not getattr(self, item.name)]

    @property
    def fetch_max_wait_ms(self) -> int:
        """The long poll that suits it near the end of a topic: POLAR_FETCH_MAX_WAIT_MS."""
        return 500 if self.wakes_long_poll else 100


def remedy(capability: str) -> str:
    """What polar does, or the user must do, where a capability is missing."""
    return _REMEDIES[capability]


def log_capabilities(capabilities: Capabilities) -> None:
    """One line a gap."""
    if not capabilities.missing:
        logger.info("broker (%s): no gaps", capabilities.kind)
    for name in capabilities.missing:
        logger.info("broker (%s) without %s: %s", capabilities.kind, name, remedy(name))


async def probe(bootstrap_servers: str, kind: BrokerKind) -> Capabilities:
    """Ask the broker which requests it takes. Raises LogUnavailableError."""
    offered = await _offered_requests(bootstrap_servers)
    is_kafka = {_ALTER_CONFIGS, _CREATE_PARTITIONS} <= offered
    return Capabilities(kind, is_kafka, is_kafka, is_kafka, is_kafka, is_kafka, is_kafka)


async def _offered_requests(bootstrap_servers: str) -> set[int]:
    """API keys of an ApiVersions (version 0) response of the first server that answers."""
    error: Exception | None = None
    for server in bootstrap_servers.split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            return await asyncio.wait_for(_api_versions(host.strip("[]"), int(port)), _TIMEOUT_SECONDS)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, struct.error) as failure:
            error = failure
    raise LogUnavailableError(f"no Kafka broker answers at {bootstrap_servers} ({error!r})")


async def _api_versions(host: str, port: int) -> set[int]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        name = b"polar"
        request = struct.pack(">hhih", _API_VERSIONS, 0, 1, len(name)) + name
        writer.write(struct.pack(">i", len(request)) + request)
        await writer.drain()
        (size,) = struct.unpack(">i", await reader.readexactly(4))
        body = await reader.readexactly(size)
    finally:
        writer.close()
    # correlation id, error code, number of entries, then (key, lowest, highest) each
    _, _, count = struct.unpack_from(">ihi", body)
    return {struct.unpack_from(">hhh", body, 10 + 6 * index)[0] for index in range(count)}
