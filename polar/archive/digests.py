"""Digests of what a live run recorded, in the form in which a replay prints its own."""

from collections.abc import Iterable

from polar.core.replaying import batches_digest
from schemas.base import Event, digest_of
from schemas.batches import BatchManifest
from schemas.groups import ScoredGroup
from schemas.trajectories import Trajectory


def recorded_digests(events: Iterable[Event]) -> dict[str, str]:
    """One digest a kind, over values in order of their ids; of equal ids the first counts."""
    trajectories: dict[str, Trajectory] = {}
    groups: dict[str, ScoredGroup] = {}
    manifests: dict[int, BatchManifest] = {}
    for event in events:
        match event:
            case Trajectory():
                trajectories.setdefault(event.trajectory_id, event)
            case ScoredGroup():
                groups.setdefault(event.group_id, event)
            case BatchManifest():
                manifests.setdefault(event.number, event)
            case _:
                pass
    return {
        "trajectories": digest_of(*(trajectories[key] for key in sorted(trajectories))),
        "groups": digest_of(*(groups[key] for key in sorted(groups))),
        "batches": batches_digest(manifests[number] for number in sorted(manifests)),
    }
