"""Tiny models and the settings that go with them."""

from pathlib import Path

import pytest

from polar.settings import TrainerSettings
from tests.unit.trainer.tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def settings(tiny_folder: Path) -> TrainerSettings:
    return TrainerSettings(model_path=tiny_folder, learning_rate=1e-3, warmup_steps=2, num_threads=1)
