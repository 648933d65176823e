"""THE TABLE: topic → key, models, partitions, retention, size. Everything else imports it.

Topics are created from it (no auto-creation). A deployment may put another word in place of
`polar` (`TopicSpec.named`), so that several runs share a broker.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from schemas.base import Event
from schemas.batches import BatchManifest, PackedRow
from schemas.calls import CallRecord, SessionAbandoned, SessionOpened, SessionSealed
from schemas.engines import EngineState
from schemas.group_events import GroupMembersFixed, GroupOpened, GroupSealed
from schemas.groups import ScoredGroup
from schemas.nodes import (
    CancelSession,
    GatewayHeartbeat,
    NodeHeartbeat,
    PrewarmRuntime,
    SchedulerStarted,
    StartSession,
)
from schemas.policies import PolicyPublished
from schemas.rewards import Reward
from schemas.sessions import (
    SessionFinished,
    SessionLost,
    SessionReady,
    SessionRequested,
    SessionStarted,
)
from schemas.tasks import RolloutTask, TaskCancelled
from schemas.trajectories import Trajectory

NUM_SESSION_PARTITIONS = 4
"""Partitions of topics keyed by task, node or session."""
NUM_GROUP_PARTITIONS = 4
"""G: one number for every topic keyed by group_id, so that equal partitions hold equal groups."""

_MIB = 1024 * 1024
_WEEK_MS = 7 * 24 * 3600 * 1000
RECORD_OVERHEAD_BYTES = _MIB
"""Room for the framing around a record: brokers measure whole batches, `max_message_bytes`
counts value, key and headers."""


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """One row of the table."""

    suffix: str
    """Name without the leading `polar.`."""
    models: Mapping[type[Event], str]
    """Model → its field that is the record key."""
    partitions: Literal["sessions", "groups", "one"]
    written_by: str
    kept: Literal["time", "compacted", "forever"] = "time"
    max_message_bytes: int = 16 * _MIB
    """Largest record (uncompressed value, key and headers; inclusive); checked before a send."""
    raw: bool = False
    """Values are bytes of another topic, not a model of this table."""

    @property
    def name(self) -> str:
        """Default name of the topic."""
        return self.named("polar")

    def named(self, prefix: str) -> str:
        """Name under another prefix (letters, digits, dots, hyphens)."""
        return f"{prefix}.{self.suffix}"

    def num_partitions(
        self, sessions: int = NUM_SESSION_PARTITIONS, groups: int = NUM_GROUP_PARTITIONS
    ) -> int:
        """Partition count in a deployment with these two numbers."""
        return {"sessions": sessions, "groups": groups, "one": 1}[self.partitions]

    def configs(self) -> dict[str, str]:
        """Topic configuration for the broker."""
        values = {
            "max.message.bytes": str(self.max_message_bytes + RECORD_OVERHEAD_BYTES),
            "compression.type": "producer",
        }
        if self.kept == "compacted":
            values["cleanup.policy"] = "compact"
        else:
            values["cleanup.policy"] = "delete"
            values["retention.ms"] = str(_WEEK_MS if self.kept == "time" else -1)
            # Copies and replays carry old timestamps; retention must not go by those.
            values["message.timestamp.type"] = "LogAppendTime"
        return values

    def key_of(self, event: Event) -> str:
        """Record key of an event. Raises KeyError for a model of another topic."""
        return str(getattr(event, self.models[type(event)]))


TASKS = TopicSpec("tasks.v1", {RolloutTask: "task_id", TaskCancelled: "task_id"}, "sessions", "rollout API")
NODE_COMMANDS = TopicSpec(
    "node-commands.v1",
    {PrewarmRuntime: "node_id", StartSession: "node_id", CancelSession: "node_id"},
    "sessions",
    "scheduler",
)
NODES = TopicSpec(
    "nodes.v1",
    {NodeHeartbeat: "node_id", GatewayHeartbeat: "gateway_id", SchedulerStarted: "scheduler_id"},
    "one",
    "node, gateway, scheduler",
    kept="compacted",
)
SESSIONS = TopicSpec(
    "sessions.v1",
    {
        SessionRequested: "session_id",
        SessionReady: "session_id",
        SessionStarted: "session_id",
        SessionFinished: "session_id",
        SessionLost: "session_id",
    },
    "sessions",
    "node; scheduler writes SessionRequested and SessionLost",
)
CALLS = TopicSpec(
    "calls.v1",
    {
        SessionOpened: "session_id",
        CallRecord: "session_id",
        SessionSealed: "session_id",
        SessionAbandoned: "session_id",
    },
    "sessions",
    "the gateway that owns the session; scheduler and stitcher write SessionAbandoned",
)
TRAJECTORIES = TopicSpec(
    "trajectories.v1", {Trajectory: "group_id"}, "groups", "stitcher", max_message_bytes=64 * _MIB
)
REWARDS = TopicSpec("rewards.v1", {Reward: "group_id"}, "groups", "evaluators, outside programs")
GROUP_EVENTS = TopicSpec(
    "group-events.v1",
    {GroupOpened: "group_id", GroupMembersFixed: "group_id", GroupSealed: "group_id"},
    "groups",
    "scheduler; grouper writes GroupSealed",
)
GROUPS = TopicSpec("groups.v1", {ScoredGroup: "group_id"}, "groups", "grouper", max_message_bytes=64 * _MIB)
BATCHES = TopicSpec(
    "batches.v1",
    {BatchManifest: "policy", PackedRow: "policy"},
    "one",
    "packer",
    max_message_bytes=64 * _MIB,
)
POLICIES = TopicSpec("policies.v1", {PolicyPublished: "policy"}, "one", "trainer", kept="forever")
ENGINES = TopicSpec("engines.v1", {EngineState: "engine_id"}, "one", "weight-sync", kept="compacted")
DEAD_LETTERS = TopicSpec("dead-letters.v1", {}, "one", "every stage", max_message_bytes=65 * _MIB, raw=True)

TOPICS: tuple[TopicSpec, ...] = (
    TASKS, NODE_COMMANDS, NODES, SESSIONS, CALLS, TRAJECTORIES, REWARDS, GROUP_EVENTS, GROUPS,
    BATCHES, POLICIES, ENGINES, DEAD_LETTERS,
)  # fmt: skip

TOPIC_OF: Mapping[type[Event], TopicSpec] = {model: topic for topic in TOPICS for model in topic.models}
"""The one topic on which a model travels."""

MODEL_OF: Mapping[str, type[Event]] = {model.model_fields["type"].default: model for model in TOPIC_OF}
"""Model by its `type` field."""
