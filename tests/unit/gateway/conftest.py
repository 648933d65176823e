"""Fixtures of the gateway's unit tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.gateway.fake_engine import FakeEngine, running_engine
from tests.unit.gateway.running import RunningGateway, running_gateway


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with running_engine() as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path, engine.url) as gateway:
        yield gateway
