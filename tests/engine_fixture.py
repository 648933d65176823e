"""One real vLLM server with a tiny random model for the whole test run, started by its first user.

Tests leave it as they found it: running, with its base weights, version `default`.
"""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """Where it is and what it serves."""

    base_url: str
    """Without /v1."""
    model_path: Path
    """Hugging Face folder in float32: 2 layers, hidden 128, vocabulary 49,152."""
    served_model: str


@pytest.fixture(scope="session")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    """The shared server (marker `engine`)."""
    from polar.engines.models import prepare_tiny_qwen3
    from polar.engines.vllm_server import VllmServer
    from polar.settings import EngineSettings
    from tests.chat_models import cache_dir

    model_path = prepare_tiny_qwen3(cache_dir(request.config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = EngineSettings(model_path=model_path, port=port)
    server = VllmServer(settings, log_file=tmp_path_factory.mktemp("engine") / "vllm.log")
    server.start()
    try:
        server.wait_until_healthy(timeout_seconds=280)
        yield RunningEngine(server.base_url, model_path, settings.served_model)
    finally:
        server.stop()
