"""A gateway before an engine that says what a test wants."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conformance.scripted import Scripted
from tests.unit.gateway.fake_engine import running_engine
from tests.unit.gateway.running import running_gateway


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Scripted]:
    async with running_engine() as engine, running_gateway(tmp_path, engine.url) as gateway:
        yield Scripted(engine, gateway, await gateway.open())
