"""What polar's own brokers need, and how their programs are kept up; small programs stand in."""

import json
import os
import signal
import socket
import stat
import sys
import time
from pathlib import Path

import pytest

from polar.core.stage import Partition
from polar.errors import LogError, SettingsError
from polar.kafka import apache, embedded
from polar.kafka.brokers import OwnBroker, open_broker
from polar.kafka.children import Children, Program
from polar.kafka.dead_letters import letter_of, record_of
from polar.kafka.records import RawRecord, raw_record
from schemas.dead_letters import DeadLetter
from tests.brokers import free_port
from tests.unit.kafka.consumer_records import fetched

SLEEPER = "import sys, time, pathlib; pathlib.Path(sys.argv[1]).write_text('up'); time.sleep(600)"


def sleeper(name: str, folder: Path) -> Program:
    """A program that is ready once it has written its file."""
    mark = folder / f"{name}.up"
    return Program(
        name=name,
        argv=[sys.executable, "-c", SLEEPER, str(mark)],
        log=folder / f"{name}.log",
        ready=mark.exists,
    )


def wait_for(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_programs_come_back_and_end_with_their_supervisor(tmp_path: Path) -> None:
    children = Children([sleeper("one", tmp_path), sleeper("two", tmp_path)])
    children.start()
    try:
        before = children.pids
        assert set(before) == {"one", "two"}
        os.kill(before["one"], signal.SIGKILL)
        wait_for(lambda: children.pids.get("one", before["one"]) != before["one"])
        assert children.pids["two"] == before["two"]
        assert children.restarts == 1
    finally:
        last = children.pids
        children.stop()
    assert not any(is_alive(pid) for pid in last.values())


def test_a_program_that_ends_at_once_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    broken = Program(
        name="broken", argv=[sys.executable, "-c", "import sys; sys.exit('no space left')"],
        log=tmp_path / "broken.log", ready=lambda: False,
    )  # fmt: skip
    first = sleeper("first", tmp_path)
    children = Children([first, broken])
    with pytest.raises(LogError, match="broken ended with status 1: no space left"):
        children.start()
    assert children.pids == {}


def test_store_credentials_are_made_once_and_private(tmp_path: Path) -> None:
    first = embedded._credentials(tmp_path)
    assert embedded._credentials(tmp_path) == first
    assert stat.S_IMODE((tmp_path / "s3.json").stat().st_mode) == 0o600
    assert first.secret_key not in repr(first)
    assert len(first.secret_key) == 40
    other = tmp_path / "other"
    other.mkdir()
    assert embedded._credentials(other) != first


def test_store_ports_are_kept_and_leave_the_broker_its_own(tmp_path: Path) -> None:
    ports = embedded._store_ports(tmp_path, 12000)
    assert embedded._store_ports(tmp_path, 12000) == ports
    assert len({*ports.values(), 12000}) == 5
    assert json.loads((tmp_path / "store-ports.json").read_text()) == ports


def test_a_folder_without_kafka_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"bin/kafka-server-start\.sh"):
        apache.kafka_children(tmp_path / "data", 9092, tmp_path)
    with pytest.raises(SettingsError, match="--kafka-home"):
        open_broker("kafka-home", tmp_path, 9092)
    with pytest.raises(SettingsError, match="--bootstrap-servers"):
        open_broker("external", tmp_path, 9092)


@pytest.mark.parametrize(("says", "found"), [('openjdk version "11.0.2"', "version 11"), ("", "none")])
def test_an_old_or_missing_java_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, found: str
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SettingsError, match=f"Java 17 or newer, {found}"):
        apache.check_java()


def test_the_java_of_newer_and_older_numbering_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    for text, version in (('openjdk version "17.0.11" 2024-04-16', 17), ('java version "1.8.0_392"', 8)):
        java.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
        java.chmod(0o755)
        assert apache.java_version() == version


def test_a_taken_port_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        broker = open_broker("embedded", tmp_path, port)
        assert isinstance(broker, OwnBroker)
        with pytest.raises(SettingsError, match=f"port {port}"):
            broker.start()
        assert broker.pids == {}


@pytest.mark.parametrize("key", [b"text", b"\xff\x00", b"", None])
def test_a_dead_letter_gives_back_coordinates_and_key(key: bytes | None) -> None:
    letter = DeadLetter(
        source_topic="calls.v1",
        source_partition=3,
        source_offset=70,
        stage="stitcher",
        reason="invalid",
        detail="ä",
    )
    headers = {name: value.decode() for name, value in record_of(letter, key).items()}
    assert letter_of(RawRecord(Partition("dead-letters.v1", 0), 0, b"calls.v1", b"", headers)) == (
        letter,
        key,
    )


def test_a_record_that_is_no_dead_letter_is_named() -> None:
    with pytest.raises(ValueError, match="offset 4"):
        letter_of(RawRecord(Partition("dead-letters.v1", 0), 4, None, b"", {}))


def test_odd_header_bytes_never_fail() -> None:
    record = fetched(0)
    odd = type(record)(record.topic, 0, 0, b"", headers=(("a", b"\xff"), ("b", None)))  # type: ignore[arg-type]
    assert raw_record(Partition("rewards.v1", 0), odd).headers == {"a": "�", "b": ""}
