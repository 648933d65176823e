"""Hypothesis strategies: sessions over a tiny vocabulary, so that prefixes collide all the time."""

import math
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from schemas.calls import CallRecord, Delivery, SessionAbandoned, SessionOpened, SessionSealed
from schemas.sessions import Outcome
from tests.unit.core.call_records import SessionRecords, interval

LAWS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""No time limits: a slow machine says nothing about a law."""

TOKEN = st.integers(0, 3)
LOGPROB = st.sampled_from([-0.25, -0.5, -1.0, -2.0, 0.0, math.nan, -math.inf, 0.5, -9999.0])


@dataclass
class Script:
    """A session's records in the order of its partition."""

    records: SessionRecords
    closing: SessionSealed | SessionAbandoned

    @property
    def events(self) -> list[SessionOpened | CallRecord | SessionSealed | SessionAbandoned]:
        return [self.records.opened, *self.records.records, self.closing]


@st.composite
def scripts(draw: st.DrawFn, session_id: str = "t/0/0/1", max_calls: int = 7, max_step: int = 3) -> Script:
    """A session with growing, branching, repeating, retried, aborted and broken calls."""
    session = SessionRecords(session_id)
    for seq in range(1, draw(st.integers(0, max_calls)) + 1):
        base = draw(st.none() | st.integers(1, seq - 1)) if seq > 1 else None
        prompt: list[int] = []
        if base is not None:
            path = session.paths[base]
            prompt = path[: draw(st.one_of(st.just(len(path)), st.integers(0, len(path))))]
        prompt = prompt + draw(st.lists(TOKEN, min_size=0 if prompt else 1, max_size=4))
        sampled = draw(st.lists(TOKEN, max_size=4))
        fields: dict[str, Any] = {
            "request_digest": draw(st.sampled_from(["r0", "r1", f"own-{seq}"])),
            "choice_index": draw(st.sampled_from([0, 0, 0, 1])),
            "open_calls": tuple(sorted(draw(st.sets(st.integers(1, seq - 1), max_size=2))))
            if seq > 1
            else (),
            "thread_id": draw(st.sampled_from(["", "", "sub"])),
            "kind": draw(st.sampled_from(["agent", "agent", "agent", "subagent", "compaction", "auxiliary"])),
            "finish_reason": draw(st.sampled_from(["stop", "stop", "tool_calls", "length", "abort", None])),
            "delivery": draw(st.sampled_from([Delivery.DELIVERED] * 5 + [Delivery.CLIENT_ABORTED])),
            "policy": interval(draw(st.integers(1, max_step))),
            "sampling_used": {"temperature": draw(st.sampled_from([1.0, 0.7]))},
        }
        logprobs = draw(st.lists(LOGPROB, min_size=len(sampled), max_size=len(sampled)))
        session.call(prompt, sampled, base=base, logprobs=logprobs, **fields)
    closing = draw(st.sampled_from(["sealed", "sealed", "sealed", "abandoned"]))
    outcome = draw(st.sampled_from(list(Outcome)))
    return Script(session, session.sealed(outcome) if closing == "sealed" else session.abandoned())
