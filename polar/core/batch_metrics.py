"""What a batch's manifest says about the calls of its groups: kinds, causes, sharing."""

from collections import Counter
from collections.abc import Iterable, Mapping

from polar.core.metrics import Metrics
from polar.core.tree_outline import causes_of, kind_of
from schemas.groups import ScoredGroup
from schemas.trees import StitchedCall


def sampled_by_kind(calls: Iterable[StitchedCall]) -> Counter[str]:
    """Kind → tokens sampled by calls of that kind; `untrainable` for calls that must not be trained."""
    counts: Counter[str] = Counter()
    for call in calls:
        counts[kind_of(call)] += call.sampled_tokens
    return +counts


def group_metrics(groups: Iterable[ScoredGroup]) -> dict[str, float | dict[str, float]]:
    """Metrics over all calls of these groups, trained or not.

    `calls`, `sampled_tokens`, `sampled_share_by_kind` (shares that sum up to 1),
    `calls_by_cause` (calls that split off from an earlier one), and `excluded_members_by_reason`
    (rollouts outside the baseline).
    """
    groups = list(groups)
    calls = [call for group in groups for call in group.calls]
    excluded = Counter(
        member.excluded for group in groups for member in group.members if member.excluded is not None
    )
    kinds = sampled_by_kind(calls)
    total = kinds.total()
    causes = causes_of(calls)
    return {
        "calls": float(len(calls)),
        "sampled_tokens": float(total),
        "sampled_share_by_kind": {kind: kinds[kind] / total for kind in sorted(kinds)},
        "calls_by_cause": {cause: float(causes[cause]) for cause in sorted(causes)},
        "excluded_members_by_reason": {reason: float(excluded[reason]) for reason in sorted(excluded)},
    }


def sharing_ratios(metrics: Mapping[str, float]) -> dict[str, float]:
    """`unique_over_naive` and `computed_over_unique` of packed rows; 0 without tokens."""

    def ratio(above: str, below: str) -> float:
        return metrics[above] / metrics[below] if metrics[below] else 0.0

    return {
        "unique_over_naive": ratio("unique_tokens", "naive_tokens"),
        "computed_over_unique": ratio("computed_tokens", "unique_tokens"),
    }


def prefixed(prefix: str, metrics: Metrics) -> dict[str, float | Mapping[str, float]]:
    """The same numbers under `prefix_…`."""
    return {f"{prefix}_{name}": value for name, value in metrics.items()}
