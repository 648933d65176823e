"""Fixtures of the tests with real harnesses; what is not installed skips, loudly at the end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from polar.engines.model_cache import default_cache_dir
from polar.engines.models import prepare_smollm2
from tests.chat_models import qwen3_folder
from tests.harness.packages import NotInstalledError, command_of
from tests.harness.scripted_engine import ScriptedEngine, serving
from tests.harness.scripted_model import ScriptedModel
from tests.harness.stage import Commands, Stage
from tests.unit.gateway.running import running_gateway

SKIPPED = "real harness not installed"


@pytest.fixture(scope="session")
def plain_model() -> ScriptedModel:
    """SmolLM2's tokenizer with a ChatML template."""
    return ScriptedModel(prepare_smollm2(default_cache_dir()))


@pytest.fixture(scope="session")
def thinking_model(plain_model: ScriptedModel) -> ScriptedModel:
    """Qwen3's tokenizer and template, with reasoning before each answer; where npm gives it."""
    folder = qwen3_folder(default_cache_dir())
    return plain_model if folder is None else ScriptedModel(folder)


@pytest.fixture(scope="session")
def commands(request: pytest.FixtureRequest) -> Commands:
    """Installs a harness when a test first needs it, and shows that it does."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def command(name: str) -> list[str]:
        try:
            with capture.global_and_fixture_disabled():
                return command_of(name)
        except NotInstalledError as error:
            pytest.skip(f"{SKIPPED}: {error}")

    return command


@asynccontextmanager
async def staged(model: ScriptedModel, folder: Path, commands: Commands) -> AsyncIterator[Stage]:
    engine = ScriptedEngine(model)
    async with (
        serving(engine),
        running_gateway(folder / "gateway", engine.url, model_path=model.folder) as gateway,
    ):
        yield Stage(gateway, engine, folder, commands)


@pytest.fixture
async def stage(plain_model: ScriptedModel, tmp_path: Path, commands: Commands) -> AsyncIterator[Stage]:
    async with staged(plain_model, tmp_path, commands) as stage:
        yield stage


@pytest.fixture
async def thinking_stage(
    thinking_model: ScriptedModel, tmp_path: Path, commands: Commands
) -> AsyncIterator[Stage]:
    async with staged(thinking_model, tmp_path, commands) as stage:
        yield stage


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly which harnesses were not tested."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = sorted({str(r.longrepr[2]) for r in reports if SKIPPED in str(r.longrepr)})
    if reasons:
        terminalreporter.section("REAL HARNESSES WERE NOT TESTED", sep="!")
        for reason in reasons:
            terminalreporter.line(reason)
