"""polar.sessions.v1: the lifecycle of a session, past participles."""

from enum import StrEnum
from typing import Literal

from schemas.base import Event


class Outcome(StrEnum):
    """How a session ended."""

    COMPLETED = "completed"
    """The harness exited with status 0."""
    AGENT_ERROR = "agent_error"
    """The harness exited with another status; scores 0 where no reward says otherwise."""
    TIMED_OUT = "timed_out"
    """The harness used up its run budget."""
    INFRA_ERROR = "infra_error"
    """Runtime, node, gateway or engine failed: outside the baseline, may be tried again."""
    CANCELLED = "cancelled"


class SessionRequested(Event):
    """The scheduler placed an attempt on a node."""

    type: Literal["SessionRequested"] = "SessionRequested"
    session_id: str
    group_id: str
    node_id: str
    gateway_id: str


class SessionReady(Event):
    """Runtime prepared and session opened at its gateway."""

    type: Literal["SessionReady"] = "SessionReady"
    session_id: str
    group_id: str
    node_id: str
    warm: bool
    """Whether the runtime came from the READY buffer."""


class SessionStarted(Event):
    """The harness runs."""

    type: Literal["SessionStarted"] = "SessionStarted"
    session_id: str
    group_id: str
    node_id: str


class SessionFinished(Event):
    """Harness ended, session sealed, evaluation done and its rewards on the log."""

    type: Literal["SessionFinished"] = "SessionFinished"
    session_id: str
    group_id: str
    node_id: str
    outcome: Outcome
    reason: str = ""
    """Words for a person: exit status, the limit that was hit, what failed."""
    sealed: bool = True
    """Whether the gateway confirmed the seal; if not the scheduler abandons the session."""
    calls: int = 0
    run_seconds: float = 0.0


class SessionLost(Event):
    """The node that held the session is gone; decided by the scheduler."""

    type: Literal["SessionLost"] = "SessionLost"
    session_id: str
    group_id: str
    reason: str
