"""One quick demo serves many tests: each costs minutes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployments import broker_of, finish, last_json, left_over, polar, start


@dataclass(frozen=True, slots=True)
class QuickDemo:
    """A quick demo that ended."""

    data_dir: Path
    summary: dict[str, Any]
    seconds: float
    left_over: list[int]


@dataclass(frozen=True, slots=True)
class Archive:
    """The archive of the quick demo, and its broker, which runs again."""

    folder: Path
    made: dict[str, Any]
    broker: dict[str, str]


@pytest.fixture(scope="session")
def quick_demo(tmp_path_factory: pytest.TempPathFactory) -> QuickDemo:
    """`polar demo --quick --json`, everything real."""
    place = tmp_path_factory.mktemp("quick-demo")
    data_dir, log = place / "data", place / "stderr.log"
    started = time.monotonic()
    process = start("demo", "--quick", "--json", "--data-dir", str(data_dir), "--time-limit", "600", log=log)
    status, output = finish(process, 700)
    seconds = time.monotonic() - started
    assert status == 0, log.read_text()[-4000:]
    return QuickDemo(data_dir, last_json(output), seconds, left_over(data_dir))


@pytest.fixture(scope="session")
def archive(quick_demo: QuickDemo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archive]:
    """The quick demo's topics in a folder; its broker is up for the session."""
    place = tmp_path_factory.mktemp("archive")
    with broker_of(quick_demo.data_dir, place / "broker.log") as broker:
        status, output = polar(
            "archive", "--data-dir", str(quick_demo.data_dir), "--to", str(place / "run"), "--json"
        )
        assert status == 0
        yield Archive(place / "run", last_json(output), broker)
