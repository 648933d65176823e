"""Fixtures of the gateway's unit tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.unit.gateway.fake_engine import FakeEngine, running_engine
from tests.unit.gateway.running import RunningGateway, running_gateway

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with running_engine() as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path, engine.url) as gateway:
        yield gateway
