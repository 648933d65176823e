"""Laws of the session state machine."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.core.lifecycle import TRANSITIONS, IllegalTransitionError, LifecycleEvent, SessionState, apply
from schemas.sessions import (
    Outcome,
    SessionFinished,
    SessionLost,
    SessionReady,
    SessionRequested,
    SessionStarted,
)

IDS = {"session_id": "t/0/0/1", "group_id": "t"}
REQUESTED = SessionRequested(node_id="n", gateway_id="g", **IDS)
READY = SessionReady(node_id="n", warm=True, **IDS)
STARTED = SessionStarted(node_id="n", **IDS)
FINISHED = SessionFinished(node_id="n", outcome=Outcome.COMPLETED, **IDS)
LOST = SessionLost(reason="r", **IDS)
EVENTS: tuple[LifecycleEvent, ...] = (REQUESTED, READY, STARTED, FINISHED, LOST)


def run(*events: LifecycleEvent) -> SessionState:
    state = SessionState.NEW
    for event in events:
        state = apply(state, event)
    return state


def test_a_whole_life() -> None:
    states = list(
        itertools.accumulate((REQUESTED, READY, STARTED, FINISHED), apply, initial=SessionState.NEW)
    )
    assert states == ["new", "requested", "ready", "running", "finished"]


@pytest.mark.parametrize("events", [(REQUESTED,), (REQUESTED, READY), (REQUESTED, READY, STARTED)])
@pytest.mark.parametrize("end", [FINISHED, LOST])
def test_it_may_end_at_any_time_once_it_was_requested(
    events: tuple[LifecycleEvent, ...], end: LifecycleEvent
) -> None:
    assert run(*events, end).is_terminal


@given(st.sampled_from((SessionState.FINISHED, SessionState.LOST)), st.lists(st.sampled_from(EVENTS)))
def test_terminal_states_absorb(state: SessionState, events: list[LifecycleEvent]) -> None:
    for event in events:
        assert apply(state, event) is state


@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_illegal_transitions_raise_and_repeats_change_nothing(events: list[LifecycleEvent]) -> None:
    state = SessionState.NEW
    for event in events:
        allowed = state.is_terminal or (state, type(event)) in TRANSITIONS
        if not allowed:
            with pytest.raises(IllegalTransitionError, match="does not follow"):
                apply(state, event)
            continue
        state = apply(state, event)
        assert apply(state, event) is state, "delivered twice"


@pytest.mark.parametrize(
    "events",
    [(READY,), (STARTED,), (FINISHED,), (LOST,), (REQUESTED, STARTED), (REQUESTED, READY, REQUESTED)],
)
def test_what_does_not_fit_is_refused(events: tuple[LifecycleEvent, ...]) -> None:
    with pytest.raises(IllegalTransitionError):
        run(*events)
