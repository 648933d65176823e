"""Everything of a run that the ledger and the report need, decoded from the log."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas.base import Event
from schemas.batches import BatchManifest, PackedRow
from schemas.calls import CallRecord, SessionOpened
from schemas.engines import EngineState
from schemas.groups import ScoredGroup
from schemas.nodes import NodeHeartbeat
from schemas.policies import PolicyPublished
from schemas.topics import BATCHES, CALLS, ENGINES, GROUPS, NODES, POLICIES, TRAJECTORIES, TopicSpec
from schemas.trajectories import Trajectory

TOPICS_READ: tuple[TopicSpec, ...] = (CALLS, TRAJECTORIES, GROUPS, BATCHES, POLICIES, ENGINES, NODES)


@dataclass(slots=True)
class Recorded:
    """A run's records by kind, each in the order of the log."""

    opened: list[SessionOpened] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    """Repeats included."""
    trajectories: list[Trajectory] = field(default_factory=list)
    groups: list[ScoredGroup] = field(default_factory=list)
    manifests: list[BatchManifest] = field(default_factory=list)
    """First of a number only, in order of numbers."""
    rows: list[PackedRow] = field(default_factory=list)
    """First of (batch, index) only."""
    policies: list[PolicyPublished] = field(default_factory=list)
    engines: list[EngineState] = field(default_factory=list)
    heartbeats: list[NodeHeartbeat] = field(default_factory=list)

    @property
    def distinct_calls(self) -> dict[str, CallRecord]:
        """First record of each call id."""
        found: dict[str, CallRecord] = {}
        for call in self.calls:
            found.setdefault(call.call_id, call)
        return found


def collect(events: Iterable[Event]) -> Recorded:
    """Sort events by kind; duplicates by id are dropped where the stages drop them too."""
    run = Recorded()
    manifests: dict[int, BatchManifest] = {}
    rows: dict[tuple[int, int], PackedRow] = {}
    for event in events:
        match event:
            case SessionOpened():
                run.opened.append(event)
            case CallRecord():
                run.calls.append(event)
            case Trajectory():
                run.trajectories.append(event)
            case ScoredGroup():
                run.groups.append(event)
            case PolicyPublished():
                run.policies.append(event)
            case EngineState():
                run.engines.append(event)
            case NodeHeartbeat():
                run.heartbeats.append(event)
            case BatchManifest():
                manifests.setdefault(event.number, event)
            case PackedRow():
                rows.setdefault((event.batch_number, event.index), event)
            case _:
                pass
    run.manifests = [manifests[number] for number in sorted(manifests)]
    run.rows = [rows[key] for key in sorted(rows)]
    return run
