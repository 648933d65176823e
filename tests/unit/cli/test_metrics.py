"""Numbers of a process as Prometheus reads them."""

import asyncio
import threading
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from polar.cli.deployment import UpOptions, resolve
from polar.errors import SettingsError
from polar.settings import ProcessSettings
from polar.supervision.ports import reserve_ports
from polar.telemetry import metrics
from polar.telemetry.metrics import Exposition, serve_metrics


def scrape(exposition: Exposition) -> list[str]:
    registry = CollectorRegistry()
    registry.register(exposition)
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_gauges_counters_and_labels_are_told_apart_by_name() -> None:
    exposition = Exposition("packer")
    exposition.add(lambda: {"lag_records": 3, "splits_by_cause": {"retry": 2, "bos": 1}})
    exposition.add(lambda: {"refusals_by_status_total": {"401": 7}, "batches_total": 4})
    assert scrape(exposition) == [
        'polar_lag_records{service="packer"} 3.0',
        'polar_splits_by_cause{cause="retry",service="packer"} 2.0',
        'polar_splits_by_cause{cause="bos",service="packer"} 1.0',
        'polar_refusals_by_status_total{service="packer",status="401"} 7.0',
        'polar_batches_total{service="packer"} 4.0',
    ]


def test_a_source_that_fails_costs_only_its_own_numbers(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("no numbers")

    exposition = Exposition("node")
    exposition.add(broken)
    exposition.add(lambda: {"ready": 1, "is_up": True})
    exposition.add(lambda: {"ready": 2})
    assert scrape(exposition) == ['polar_ready{service="node"} 1.0', 'polar_is_up{service="node"} 1.0']
    assert "metrics could not be read" in caplog.text


async def test_a_source_is_read_in_the_event_loop_that_added_it() -> None:
    threads: list[int] = []

    def read() -> dict[str, float]:
        threads.append(threading.get_ident())
        return {"open": 1}

    exposition = Exposition("gateway")
    exposition.add(read)
    lines = await asyncio.to_thread(scrape, exposition)
    assert lines == ['polar_open{service="gateway"} 1.0']
    assert set(threads) == {threading.get_ident()}


def test_the_port_answers_and_a_taken_one_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_process", Exposition(""))
    metrics.expose(lambda: {"lag_records": 5})
    port = reserve_ports(tmp_path, ["metrics"])["metrics"]
    serve_metrics("stitcher", ProcessSettings(metrics_port=port))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b'polar_lag_records{service="stitcher"} 5.0' in answer.read()
    with pytest.raises(SettingsError, match="POLAR_METRICS_PORT"):
        serve_metrics("stitcher", ProcessSettings(metrics_port=port))


def test_each_service_of_a_machine_has_a_metrics_port_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_METRICS_PORT", "9400")
    services = resolve(UpOptions(tmp_path, free_ports=True)).services
    ports = [int(service.env["POLAR_METRICS_PORT"]) for service in services]
    assert ports == list(range(9400, 9400 + len(services)))
