"""The life of a session as its topic tells it: a table of transitions and one function.

    NEW ─SessionRequested─▶ REQUESTED ─SessionReady─▶ READY ─SessionStarted─▶ RUNNING
                                └──────────────┴───────────────┴─ SessionFinished ─▶ FINISHED
                                                               └─ SessionLost ─────▶ LOST

Invariants: FINISHED and LOST absorb whatever follows, so the first end by offset is the end;
a repeated record changes nothing (delivery is at least once); any other pair raises and
changes nothing.
"""

from collections.abc import Mapping
from enum import StrEnum

from schemas.base import Event
from schemas.sessions import (
    SessionFinished,
    SessionLost,
    SessionReady,
    SessionRequested,
    SessionStarted,
)

LifecycleEvent = SessionRequested | SessionReady | SessionStarted | SessionFinished | SessionLost


class SessionState(StrEnum):
    """Where a session is, as far as the log says."""

    NEW = "new"
    """Nothing on the log yet."""
    REQUESTED = "requested"
    """Placed on a node; waits there or makes its runtime."""
    READY = "ready"
    """Runtime prepared, session open at its gateway."""
    RUNNING = "running"
    """The harness runs, or the session is being sealed and evaluated."""
    FINISHED = "finished"
    LOST = "lost"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing changes it any more."""
        return self in (SessionState.FINISHED, SessionState.LOST)


class IllegalTransitionError(ValueError):
    """The event does not fit the state; nothing was changed."""


_S = SessionState
TRANSITIONS: Mapping[tuple[SessionState, type[Event]], SessionState] = {
    (_S.NEW, SessionRequested): _S.REQUESTED,
    (_S.REQUESTED, SessionRequested): _S.REQUESTED,
    (_S.REQUESTED, SessionReady): _S.READY,
    (_S.READY, SessionReady): _S.READY,
    (_S.READY, SessionStarted): _S.RUNNING,
    (_S.RUNNING, SessionStarted): _S.RUNNING,
    **{(state, SessionFinished): _S.FINISHED for state in (_S.REQUESTED, _S.READY, _S.RUNNING)},
    **{(state, SessionLost): _S.LOST for state in (_S.REQUESTED, _S.READY, _S.RUNNING)},
}
"""Everything that is allowed before the end; terminal states are handled by `apply`."""


def apply(state: SessionState, event: LifecycleEvent) -> SessionState:
    """The state after the event. Raises IllegalTransitionError."""
    if state.is_terminal:
        return state
    following = TRANSITIONS.get((state, type(event)))
    if following is None:
        raise IllegalTransitionError(f"{event.session_id}: {event.type} does not follow state {state.value}")
    return following
