"""Brokers for tests: one of each kind serves the whole run, started when the first test asks.

Tests tell their data apart by topic prefixes. A test may kill the processes: they are supervised
and come back on the same data; `kill` waits until they did.
"""

import os
import signal
import time
import uuid
from pathlib import Path

import psutil

from polar.kafka.brokers import OwnBroker, open_broker
from polar.settings import LogSettings
from polar.supervision.ports import is_free

KAFKA_HOME = "KAFKA_HOME"
"""Environment variable: folder of an unpacked Apache Kafka."""
_RESTART_SECONDS = 60.0


def kafka_home() -> Path | None:
    """The distribution to test against, if there is one."""
    text = os.environ.get(KAFKA_HOME, "")
    return Path(text) if text else None


def free_port() -> int:
    """A port that, like the one after it, nobody listens on."""
    for port in range(22000 + os.getpid() % 5000, 32000, 2):
        if is_free(port) and is_free(port + 1):
            return port
    raise RuntimeError("no free port")


def start_broker(kind: str, data_dir: Path) -> OwnBroker:
    """A started broker of kind `embedded` or `apache`."""
    broker = open_broker(
        "embedded" if kind == "embedded" else "kafka-home", data_dir, free_port(), kafka_home()
    )
    assert isinstance(broker, OwnBroker)
    broker.start()
    return broker


def settings_for(broker: OwnBroker, data_dir: Path, **changes: object) -> LogSettings:
    """Settings of a deployment of its own on this broker; two partitions where there are many."""
    values: dict[str, object] = {
        "bootstrap_servers": broker.bootstrap_servers,
        "topic_prefix": f"t{uuid.uuid4().hex[:8]}",
        "session_partitions": 2,
        "group_partitions": 2,
        "fetch_max_wait_ms": 100,
        "send_timeout_seconds": 30.0,
        "data_dir": data_dir,
    }
    return LogSettings(**(values | changes))  # type: ignore[arg-type]


def kill(broker: OwnBroker, *names: str) -> None:
    """kill -9 these programs of a broker (all of them when none is named), together."""
    before = broker.pids
    victims = {name: before[name] for name in names or before}
    for pid in victims.values():
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _RESTART_SECONDS
    while time.monotonic() < deadline:
        now = broker.pids
        if all(now.get(name, pid) != pid and psutil.pid_exists(now[name]) for name, pid in victims.items()):
            return
        time.sleep(0.05)
    raise AssertionError(f"{sorted(victims)} did not come back within {_RESTART_SECONDS:g} s")
