"""Nodes for tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.settings import NodeSettings
from tests.unit.rollout.fake_gateway import FakeGateway
from tests.unit.rollout.node_world import NodeWorld


@pytest.fixture
def node_settings() -> NodeSettings:
    return NodeSettings(
        id="n0", gateway_wait_seconds=1.5, seal_wait_seconds=1.5, heartbeat_seconds=0.1, keep_runtimes=3
    )


@pytest.fixture
async def world(tmp_path: Path, node_settings: NodeSettings) -> AsyncIterator[NodeWorld]:
    async with FakeGateway().running() as gateway:
        yield NodeWorld(tmp_path / "node", gateway, node_settings)
