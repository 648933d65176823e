"""One Apache Kafka node (KRaft, broker and controller in one) out of an unpacked distribution.

polar formats the directory once, starts the node with the distribution's own scripts, keeps it
up and stops it. Needs Java 17 or newer. Loopback only; for anything bigger run Kafka yourself
and use `--bootstrap-servers`.
"""

import base64
import os
import re
import shutil
import subprocess
import uuid
from pathlib import Path

from polar.errors import LogError, SettingsError
from polar.kafka.children import Children, Program, listens

MIN_JAVA = 17
_FORMAT_SECONDS = 120.0
_PROPERTIES = """\
# Written by polar at each start.
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
controller.quorum.bootstrap.servers=127.0.0.1:{controller}
log.dirs={data}
# Topics come from the table alone.
auto.create.topics.enable=false
# One node: internal topics have one replica; a few partitions do.
offsets.topic.replication.factor=1
offsets.topic.num.partitions=8
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=8
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
# A node that was killed is let in again after 2 s instead of 9 s.
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=500
# A request may hold the largest record of several partitions.
socket.request.max.bytes=536870912
"""


def kafka_children(directory: Path, port: int, kafka_home: Path) -> Children:
    """The one program of a Kafka node that serves 127.0.0.1:`port` (controller: the port after).

    Formats `directory` when it is new. Raises SettingsError when KAFKA_HOME or Java is not
    usable, LogError when formatting fails.
    """
    directory, home = directory.absolute(), kafka_home.absolute()
    _check_home(home)
    check_java()
    directory.mkdir(parents=True, exist_ok=True)
    properties = directory / "server.properties"
    properties.write_text(
        _PROPERTIES.format(port=port, controller=port + 1, data=directory / "data"), encoding="utf-8"
    )
    # The distribution's scripts write their own logs beside themselves unless told otherwise.
    environment = {"LOG_DIR": str(directory / "logs"), "KAFKA_HEAP_OPTS": "-Xms256m -Xmx512m"}
    if not (directory / "data" / "meta.properties").exists():
        _format(home, properties, environment)
    node = Program(
        name="kafka",
        argv=[str(home / "bin" / "kafka-server-start.sh"), str(properties)],
        log=directory / "kafka.log",
        ready=lambda: listens(port),
        env=environment,
        grace_seconds=15.0,
        ready_seconds=120.0,
    )
    return Children([node])


def java_version() -> int | None:
    """Major version of the Java that the scripts will run, or None without one."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        return None
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(match[1]) if match else None


def check_java() -> None:
    """Raises SettingsError when there is no Java 17 or newer."""
    version = java_version()
    if version is None or version < MIN_JAVA:
        found = "none was found" if version is None else f"version {version} was found"
        raise SettingsError(
            f"--kafka-home needs Java {MIN_JAVA} or newer, {found}: install e.g. openjdk-17-jre-headless or "
            "set JAVA_HOME; or leave --kafka-home out to use the embedded broker"
        )


def _check_home(home: Path) -> None:
    missing = [
        name
        for name in ("bin/kafka-server-start.sh", "bin/kafka-storage.sh", "libs")
        if not (home / name).exists()
    ]
    if missing:
        raise SettingsError(
            f"--kafka-home {home} is no unpacked Apache Kafka: {', '.join(missing)} is missing there"
        )


def _format(home: Path, properties: Path, environment: dict[str, str]) -> None:
    storage = str(home / "bin" / "kafka-storage.sh")
    # What its `random-uuid` makes, without starting a Java for it.
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
    _run([storage, "format", "--standalone", "-t", cluster_id, "-c", str(properties)], environment)


def _run(argv: list[str], environment: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            argv,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=_FORMAT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LogError(f"{argv[0]} {argv[1]} did not end within {_FORMAT_SECONDS:g} s") from error
    if done.returncode != 0:
        raise LogError(f"{argv[0]} {argv[1]} failed: {(done.stderr or done.stdout).strip()[-1000:]}")
