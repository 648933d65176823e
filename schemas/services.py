"""Who writes and who reads what: one row a service.

`schemas.topics` says what travels where; this table says between whom. The AsyncAPI document
is made from both, and tests compare it with what the services really subscribe to and publish.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
from schemas.topics import (
    BATCHES,
    CALLS,
    GROUP_EVENTS,
    GROUPS,
    NODE_COMMANDS,
    NODES,
    POLICIES,
    REWARDS,
    SESSIONS,
    TASKS,
    TRAJECTORIES,
    TopicSpec,
)
from schemas.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One row of the table."""

    does: str
    writes: tuple[type[Event], ...]
    reads: tuple[TopicSpec, ...]
    dead_letters: bool = False
    """Whether it lists records that it cannot use in polar.dead-letters.v1."""


SERVICES: Mapping[str, ServiceSpec] = {
    "rollout-api": ServiceSpec(
        "Accepts tasks over HTTP; part of the scheduler's process.",
        writes=(RolloutTask, TaskCancelled),
        reads=(),
    ),
    "scheduler": ServiceSpec(
        "Places sessions on nodes, keeps the READY buffer, fixes the members of groups.",
        writes=(
            SchedulerStarted, PrewarmRuntime, StartSession, CancelSession, SessionRequested, SessionLost,
            SessionAbandoned, GroupOpened, GroupMembersFixed,
        ),
        reads=(TASKS, NODES, SESSIONS, GROUP_EVENTS),
        dead_letters=True,
    ),
    "node": ServiceSpec(
        "Runs harnesses in runtimes, has them sealed, evaluates them.",
        writes=(NodeHeartbeat, SessionReady, SessionStarted, SessionFinished, Reward),
        reads=(NODE_COMMANDS,),
    ),
    "gateway": ServiceSpec(
        "Stands between harness and engine; records every call.",
        writes=(GatewayHeartbeat, SessionOpened, CallRecord, SessionSealed),
        reads=(),
    ),
    "stitcher": ServiceSpec(
        "Calls of a session → its token-prefix tree; gives up sessions that stay idle.",
        writes=(Trajectory, SessionAbandoned),
        reads=(CALLS,),
        dead_letters=True,
    ),
    "grouper": ServiceSpec(
        "Trajectories and rewards of a group → one scored tree.",
        writes=(GroupSealed, ScoredGroup),
        reads=(TRAJECTORIES, REWARDS, GROUP_EVENTS),
        dead_letters=True,
    ),
    "packer": ServiceSpec(
        "Scored groups → batches of packed rows.",
        writes=(BatchManifest, PackedRow),
        reads=(GROUPS, POLICIES, BATCHES),
        dead_letters=True,
    ),
    "trainer": ServiceSpec(
        "Batches → new weights.",
        writes=(PolicyPublished,),
        reads=(BATCHES, POLICIES),
    ),
    "weight-sync": ServiceSpec(
        "Loads published weights into the engines and tells the gateways.",
        writes=(EngineState,),
        reads=(POLICIES, NODES),
    ),
    "reward-program": ServiceSpec(
        "Any outside program that scores trajectories (polar.rewards helps to write one).",
        writes=(Reward,),
        reads=(TRAJECTORIES, REWARDS),
        dead_letters=True,
    ),
}  # fmt: skip
