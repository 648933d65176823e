"""An engine to capture from."""

from collections.abc import AsyncIterator

import pytest

from tests.unit.gateway.fake_engine import FakeEngine, running_engine


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with running_engine() as running:
        yield running
