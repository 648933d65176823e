"""Training on recorded batches, without a log, engines or harnesses.

Invariant: from the same base model the same batches give the losses of the live run.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from polar.errors import SettingsError
from polar.settings import TrainerSettings
from polar.trainer.backend import MegatronBackend
from polar.trainer.step import train_step
from schemas.batches import BatchManifest, PackedRow

logger = logging.getLogger(__name__)


def model_folder(settings: TrainerSettings) -> Path:
    """The base model. Raises SettingsError when none is named."""
    if settings.model_path is None:
        raise SettingsError("POLAR_TRAINER_MODEL_PATH is not set: name a Hugging Face model folder")
    return settings.model_path


def train_offline(
    source: Iterable[tuple[BatchManifest, Sequence[PackedRow]]],
    settings: TrainerSettings,
    *,
    export_to: Path | None = None,
) -> list[dict[str, float]]:
    """Train the base model on manifests with their rows, in order; the metrics of each step.

    Stops after `max_steps`. Staleness and the log-prob gap need the live policy versions and are
    left out. With `export_to` the final weights are written there as a Hugging Face folder.
    """
    backend = MegatronBackend(model_folder(settings), settings)
    steps: list[dict[str, float]] = []
    for manifest, rows in source:
        if settings.max_steps is not None and len(steps) >= settings.max_steps:
            break
        metrics = train_step(backend, manifest, rows, version=None, staleness_of=lambda _: 0)
        metrics["batch_number"] = float(manifest.number)
        live_only = ("staleness", "gap_tokens", "max_logprob_gap", "mean_logprob_gap")
        steps.append({name: value for name, value in metrics.items() if not name.startswith(live_only)})
        logger.info("batch %d: loss %.6f", manifest.number, metrics["loss"])
    if export_to is not None:
        backend.export(export_to)
    return steps
