"""polar.node-commands.v1 (scheduler → node) and polar.nodes.v1 (heartbeats)."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Event, WireModel
from schemas.tasks import TaskRequest


class PrewarmRuntime(Event):
    """Hold so many idle runtimes of this kind: the node's share of the READY buffer.

    A level, not an increment: repeating it changes nothing, and the last one wins.
    """

    type: Literal["PrewarmRuntime"] = "PrewarmRuntime"
    node_id: str
    command_id: str
    """`epoch/number` of the scheduler's command; heartbeats repeat the last one handled."""
    runtime_digest: str
    """Digest of the RuntimeSpec: a session takes a READY runtime with an equal one."""
    count: Annotated[int, Field(ge=0)]
    """Warm and warming runtimes; the node makes missing ones and removes surplus ones."""
    task: TaskRequest
    """Its runtime spec and init budget are used."""


class StartSession(Event):
    """Run one session on this node."""

    type: Literal["StartSession"] = "StartSession"
    node_id: str
    session_id: str
    group_id: str
    gateway_id: str
    gateway_url: str
    """The one gateway replica that owns the session, e.g. http://127.0.0.1:8700."""
    runtime_digest: str
    task: TaskRequest


class CancelSession(Event):
    """End a session early; its calls stay on the log."""

    type: Literal["CancelSession"] = "CancelSession"
    node_id: str
    session_id: str
    reason: str


class StageCounts(WireModel):
    """Sessions and runtimes in each pool of a node."""

    initializing: int = 0
    ready: int = 0
    """READY depth: warm runtimes that no session has taken yet."""
    running: int = 0
    postrun: int = 0


class NodeHeartbeat(Event):
    """What a node can take and what it holds."""

    type: Literal["NodeHeartbeat"] = "NodeHeartbeat"
    node_id: str
    incarnation: str
    """New at each start of the node process."""
    seq: int
    """Counts the heartbeats of an incarnation."""
    max_sessions: int
    """Sessions that may run at once."""
    max_ready: int
    """Warm runtimes that the node will hold."""
    counts: StageCounts
    ready_digests: dict[str, int] = {}
    """Warm and warming runtimes by runtime digest."""
    leases: tuple[str, ...] = ()
    """Session ids that the node holds (accepted and not finished)."""
    last_command: str = ""
    """command_id of the last PrewarmRuntime handled by this incarnation."""
    draining: bool = False


class GatewayHeartbeat(Event):
    """Where a gateway is and how loaded it is."""

    type: Literal["GatewayHeartbeat"] = "GatewayHeartbeat"
    gateway_id: str
    incarnation: str
    seq: int
    url: str
    """Base URL without path, e.g. http://127.0.0.1:8700."""
    open_sessions: int = 0
    in_flight: int = 0
    spool_records: int = 0
    """Records that the broker has not acknowledged yet."""
    ready: bool = True
    reason: str = ""
    """Why it is not ready (probe failure, broker down …)."""


class SchedulerStarted(Event):
    """Counts the scheduler's incarnations on the log: each start writes the next epoch."""

    type: Literal["SchedulerStarted"] = "SchedulerStarted"
    scheduler_id: Literal["scheduler"] = "scheduler"
    epoch: int
