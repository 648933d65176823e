"""How often histories broke and why, by harness and model."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from polar.core.tree_outline import causes_of
from schemas.calls import CallRecord
from schemas.trajectories import Trajectory


@dataclass(slots=True)
class CauseCounts:
    """The calls of one harness with one model."""

    harness: str
    """What the harness calls itself; empty where it does not."""
    model: str
    """The model name that it asked for."""
    calls: int = 0
    usable: int = 0
    """Calls whose tokens may be trained."""
    extending: int = 0
    """Usable calls whose prompt continues a whole earlier call, or that begin their session."""
    causes: Counter[str] = field(default_factory=Counter)
    """Cause → calls that split off for it."""


def count_causes(calls: Iterable[CallRecord], trajectories: Iterable[Trajectory]) -> list[CauseCounts]:
    """Counts over the calls of these trajectories, most calls first. `calls` tell whose they are."""
    sources: dict[str, tuple[str, str]] = {}
    for record in calls:
        sources.setdefault(record.call_id, (record.native_ids.get("harness", ""), record.model_asked))
    counts: dict[tuple[str, str], CauseCounts] = {}
    for trajectory in trajectories:
        for call in trajectory.calls:
            source = sources.get(call.call_id, ("", ""))
            count = counts.setdefault(source, CauseCounts(*source))
            count.calls += 1
            count.usable += call.untrainable is None
            count.extending += call.untrainable is None and not call.splits
            count.causes += causes_of([call])
    return sorted(counts.values(), key=lambda count: (-count.calls, count.harness, count.model))
