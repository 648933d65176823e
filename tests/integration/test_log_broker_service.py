"""`polar broker` as a process: killed with -9 it leaves nothing behind and loses nothing."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from polar.core.stage import Emit
from polar.errors import LogUnavailableError
from polar.kafka.capabilities import probe
from polar.kafka.reader import read_all
from polar.kafka.topics import missing_topics
from polar.kafka.writer import LogWriter
from polar.settings import LogSettings
from schemas.topics import REWARDS
from tests.brokers import free_port, kafka_home
from tests.integration.log_samples import reward, until

pytestmark = pytest.mark.kafka


@contextlib.contextmanager
def broker_service(kind: str, settings: LogSettings, port: int) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "POLAR_TOPIC_PREFIX": settings.topic_prefix,
        "POLAR_DATA_DIR": str(settings.data_dir),
        "POLAR_BROKER_KIND": kind,
        "POLAR_BROKER_PORT": str(port),
    }
    if kind == "kafka-home":
        environment["POLAR_BROKER_KAFKA_HOME"] = str(kafka_home())
    with (settings.data_dir / "service.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "polar.cli.main", "broker"], env=environment, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def ready(settings: LogSettings, process: subprocess.Popen[bytes]) -> None:
    """Until the service has made the topics."""
    log = settings.data_dir / "service.log"
    while True:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(LogUnavailableError):
            await probe(settings.bootstrap_servers, "external")
            if not await missing_topics(settings):
                return


@pytest.mark.parametrize("kind", ["embedded", "kafka-home"])
async def test_the_service_survives_kill_9_and_ends_at_sigterm(kind: str, tmp_path: Path) -> None:
    if kind == "kafka-home" and kafka_home() is None:
        pytest.skip("no Apache Kafka: KAFKA_HOME names no unpacked distribution")
    port = free_port()
    settings = LogSettings(
        bootstrap_servers=f"127.0.0.1:{port}",
        topic_prefix="svc",
        data_dir=tmp_path,
        send_timeout_seconds=30.0,
    )
    with broker_service(kind, settings, port) as process:
        await ready(settings, process)
        async with LogWriter(settings) as writer:
            places = await writer.write_many([Emit(reward(number)) for number in range(50)])
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        os.kill(process.pid, signal.SIGKILL)
    await until(
        lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children),
        "its programs die with it",
        20,
    )
    with broker_service(kind, settings, port) as process:
        await ready(settings, process)
        records = await read_all(settings, REWARDS)
        assert sorted((record.partition, record.offset) for record in records) == sorted(places)
        assert {record.event.reward_id for record in records} == {f"r{number}" for number in range(50)}  # type: ignore[attr-defined]
        process.send_signal(signal.SIGTERM)
        await until(lambda: process.poll() is not None, "it ends at SIGTERM", 40)
        assert process.returncode == 0, (tmp_path / "service.log").read_text()
