"""A data directory has one deployment at a time, the same ports, and the same settings again."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polar.errors import SettingsError
from polar.supervision.kept import KeptDeployment, keep_deployment, load_deployment, log_settings_of
from polar.supervision.lock import DataDirLock, lock_owner
from polar.supervision.ports import is_free, load_ports, reserve_ports
from polar.supervision.warden import start_warden


def test_a_second_owner_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with DataDirLock(tmp_path, "up"):
        assert lock_owner(tmp_path, "up") == os.getpid()
        with pytest.raises(SettingsError, match=f"process {os.getpid()}"), DataDirLock(tmp_path, "up"):
            pass
    assert lock_owner(tmp_path, "up") is None
    with DataDirLock(tmp_path, "up"):
        pass


def test_the_lock_waits_for_the_warden_of_a_dead_owner(tmp_path: Path) -> None:
    program = f"""
import os, pathlib, signal, sys
from polar.supervision.lock import DataDirLock
from polar.supervision.warden import start_warden
with DataDirLock(pathlib.Path({str(tmp_path)!r}), "up") as lock:
    start_warden({str(tmp_path)!r}, lock=lock)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    started = time.monotonic()
    with DataDirLock(tmp_path, "up"):
        assert time.monotonic() - started < 10


def test_a_warden_holds_the_lock_as_long_as_its_parent_lives(tmp_path: Path) -> None:
    with DataDirLock(tmp_path, "up") as lock:
        warden = start_warden(str(tmp_path), lock=lock)
    assert warden.stdin is not None
    with (
        pytest.raises(SettingsError, match="in use"),
        DataDirLock(tmp_path, "up", patience_seconds=0.2),
    ):
        pass
    warden.stdin.close()
    warden.wait(10)
    with DataDirLock(tmp_path, "up"):
        pass


def test_ports_are_free_distinct_and_kept(tmp_path: Path) -> None:
    ports = reserve_ports(tmp_path, ["broker", "gateway", "engine"])
    assert len(set(ports.values())) == 3
    assert all(is_free(port) for port in ports.values())
    # The port after each stays free too: a Kafka node's controller takes it.
    assert not {port + 1 for port in ports.values()} & set(ports.values())
    again = reserve_ports(tmp_path, ["broker", "relay"])
    assert {**again, "relay": 0} == {**ports, "relay": 0}
    assert load_ports(tmp_path) == again


def test_a_port_in_use_is_not_free() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not is_free(server.getsockname()[1])


def test_fixed_ports_are_taken_unless_others_were_kept(tmp_path: Path) -> None:
    assert reserve_ports(tmp_path, ["gateway"], fixed={"gateway": 8700}) == {"gateway": 8700}
    assert reserve_ports(tmp_path, ["gateway"], fixed={"gateway": 9700}) == {"gateway": 8700}


def test_a_kept_deployment_says_how_to_reach_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_BOOTSTRAP_SERVERS", "elsewhere:1")
    with pytest.raises(SettingsError, match="no deployment"):
        log_settings_of(tmp_path)
    settings = {
        "POLAR_BOOTSTRAP_SERVERS": "127.0.0.1:1",
        "POLAR_TOPIC_PREFIX": "mine",
        "POLAR_GATEWAY_PORT": "2",
    }
    keep_deployment(tmp_path, KeptDeployment(settings=settings, relay=True))
    assert load_deployment(tmp_path).relay
    log = log_settings_of(tmp_path)
    assert (log.bootstrap_servers, log.topic_prefix) == ("127.0.0.1:1", "mine")
