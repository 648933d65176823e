"""One batch as the trainer sees it, live or offline: train it, or find that nothing is live.

Invariant: the same weights, optimizer state and batch give the same metrics in both.
"""

import logging
from collections.abc import Callable, Sequence

from polar.errors import TrainerError
from polar.trainer.backend import MegatronBackend
from schemas.batches import BatchManifest, PackedRow
from schemas.policies import PolicyVersion

logger = logging.getLogger(__name__)


def train_step(
    backend: MegatronBackend,
    manifest: BatchManifest,
    rows: Sequence[PackedRow],
    *,
    version: PolicyVersion | None,
    staleness_of: Callable[[PolicyVersion], int],
) -> dict[str, float]:
    """Metrics of the step; `no_op` is 1 where no group was live and no weight was touched.

    `version` names the weights before the step; none where they have no version (offline).
    """
    metrics = {
        "batch_groups": float(len(manifest.groups)),
        "live_groups": float(len(manifest.live_groups)),
        "excluded_groups": float(len(manifest.excluded)),
        "live_rollouts": float(manifest.live_rollouts),
    }
    if manifest.mean_reward is not None:
        metrics["reward_mean"] = manifest.mean_reward
    occurrences = sum(len(row.sources) for row in rows)
    if occurrences != manifest.trained_tokens:
        raise TrainerError(
            f"batch {manifest.number}: its rows train {occurrences} tokens, "
            f"the manifest says {manifest.trained_tokens}"
        )
    if not any(weight > 0 for row in rows for weight in row.weights):
        logger.info("batch %d has no live group: step without an update", manifest.number)
        return {**metrics, "no_op": 1.0, "loss": 0.0, "trained_tokens": 0.0, "gap_tokens": 0.0}
    return {
        **metrics,
        "no_op": 0.0,
        **_staleness(rows, staleness_of),
        **backend.train_batch(rows, version),
    }


def _staleness(rows: Sequence[PackedRow], staleness_of: Callable[[PolicyVersion], int]) -> dict[str, float]:
    """Mean and maximum over trained tokens, by the first version of each call's interval."""
    total = count = worst = 0
    for row in rows:
        of_call = [staleness_of(version) for version in row.first_versions]
        ages = [of_call[ordinal] for ordinal in row.call_ordinals]
        total, count, worst = total + sum(ages), count + len(ages), max([worst, *ages])
    return {"staleness_mean": total / max(count, 1), "staleness_max": float(worst)}
