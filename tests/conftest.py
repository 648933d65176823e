"""Fixtures for all tests. Nothing heavy is imported before a test asks for it."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.engine_fixture import engine  # noqa: F401 (a fixture)

if TYPE_CHECKING:
    from polar.kafka.brokers import OwnBroker
    from polar.settings import LogSettings

# A property holds or does not; how long an example takes on a busy machine says nothing.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

_KAFKA_SKIPPED = "no Apache Kafka: KAFKA_HOME names no unpacked distribution"


@pytest.fixture(scope="session")
def embedded_broker(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[OwnBroker]":
    """The embedded broker of this run."""
    from tests.brokers import start_broker

    broker = start_broker("embedded", tmp_path_factory.mktemp("embedded"))
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def apache_broker(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[OwnBroker]":
    """The Apache Kafka node of this run. Skips where KAFKA_HOME names none."""
    from tests.brokers import kafka_home, start_broker

    if kafka_home() is None:
        pytest.skip(_KAFKA_SKIPPED)
    broker = start_broker("apache", tmp_path_factory.mktemp("apache"))
    yield broker
    broker.stop()


@pytest.fixture(params=["embedded", "apache"])
def any_broker(request: pytest.FixtureRequest) -> "OwnBroker":
    """Each kind of broker in turn."""
    broker: OwnBroker = request.getfixturevalue(f"{request.param}_broker")
    return broker


@pytest.fixture
async def log_settings(any_broker: "OwnBroker", tmp_path_factory: pytest.TempPathFactory) -> "LogSettings":
    """A deployment's log with topics of its own, on each kind of broker."""
    from polar.kafka.topics import ensure_topics
    from tests.brokers import settings_for

    settings = settings_for(any_broker, tmp_path_factory.mktemp("data"))
    await ensure_topics(settings)
    return settings


@pytest.fixture
async def embedded_log_settings(
    embedded_broker: "OwnBroker", tmp_path_factory: pytest.TempPathFactory
) -> "LogSettings":
    """The same on the embedded broker only."""
    from polar.kafka.topics import ensure_topics
    from tests.brokers import settings_for

    settings = settings_for(embedded_broker, tmp_path_factory.mktemp("data"))
    await ensure_topics(settings)
    return settings


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly that a kind of broker was not tested."""
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if _KAFKA_SKIPPED in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.section("APACHE KAFKA WAS NOT TESTED", sep="!")
        terminalreporter.line(f"{len(skipped)} tests were skipped: {_KAFKA_SKIPPED}.")
        terminalreporter.line("Type: KAFKA_HOME=/path/to/kafka_2.13-4.x make test   (needs Java 17)")
    if not os.environ.get("POLAR_CASES_DIR"):
        cases = [r for r in terminalreporter.stats.get("skipped", []) if "POLAR_CASES_DIR" in str(r.longrepr)]
        if cases:
            terminalreporter.section("FAULT CASES WERE NOT TESTED", sep="!")
            terminalreporter.line(
                f"{len(cases)} tests were skipped: POLAR_CASES_DIR names no folder of cases."
            )
