"""Generated sessions over a tiny vocabulary, so that prefixes collide all the time.

One recipe for two sources of choices: hypothesis, which shrinks what fails, and a seeded Random,
which is fast enough for whole worlds of sessions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from schemas.calls import CallRecord, Delivery, SessionAbandoned, SessionOpened, SessionSealed
from schemas.sessions import Outcome
from tests.unit.core.call_records import SessionRecords, interval

LAWS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""No time limits: a slow machine says nothing about a law."""

T = TypeVar("T")
LOGPROBS = (-0.25, -0.5, -1.0, -2.0, 0.0, math.nan, -math.inf, 0.5, -9999.0)
KINDS = ("agent", "agent", "agent", "subagent", "compaction", "auxiliary")


class Choices(Protocol):
    """Where a recipe takes its choices from."""

    def number(self, low: int, high: int) -> int: ...

    def among(self, options: Sequence[T]) -> T: ...


class RandomChoices:
    def __init__(self, random: Random) -> None:
        self.number = random.randint
        self.among = random.choice


class DrawnChoices:
    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def among(self, options: Sequence[T]) -> T:
        return options[self._draw(st.integers(0, len(options) - 1))]


@dataclass
class Script:
    """A session's records in the order of its partition."""

    records: SessionRecords
    closing: SessionSealed | SessionAbandoned

    @property
    def events(self) -> list[SessionOpened | CallRecord | SessionSealed | SessionAbandoned]:
        return [self.records.opened, *self.records.records, self.closing]


def make_script(take: Choices, session_id: str, max_calls: int, max_step: int) -> Script:
    """A session with growing, branching, repeating, retried, aborted and broken calls."""
    session = SessionRecords(session_id)
    for seq in range(1, take.number(0, max_calls) + 1):
        earlier = take.number(0, seq - 1)
        path = session.paths.get(earlier, [])
        kept = take.among([len(path), take.number(0, len(path))])
        fresh = [take.number(0, 3) for _ in range(take.number(0 if kept else 1, 4))]
        sampled = [take.number(0, 3) for _ in range(take.number(0, 4))]
        fields: dict[str, Any] = {
            "request_digest": take.among(["r0", "r1", f"own-{seq}"]),
            "choice_index": take.among([0, 0, 0, 1]),
            "open_calls": (take.number(1, seq - 1),) if seq > 1 and take.among([True, False]) else (),
            "thread_id": take.among(["", "", "sub"]),
            "kind": take.among(KINDS),
            "finish_reason": take.among(["stop", "stop", "tool_calls", "length", "abort", None]),
            "delivery": take.among([Delivery.DELIVERED] * 5 + [Delivery.CLIENT_ABORTED]),
            "policy": interval(take.number(1, max_step)),
            "sampling_used": {"temperature": take.among([1.0, 0.7])},
        }
        logprobs = [take.among(LOGPROBS) for _ in sampled]
        session.call([*path[:kept], *fresh], sampled, base=earlier or None, logprobs=logprobs, **fields)
    if take.among([True, True, True, False]):
        return Script(session, session.sealed(take.among(list(Outcome))))
    return Script(session, session.abandoned())


@st.composite
def scripts(draw: st.DrawFn, session_id: str = "t/0/0/1", max_calls: int = 7, max_step: int = 3) -> Script:
    """A session that shrinks."""
    return make_script(DrawnChoices(draw), session_id, max_calls, max_step)


def make_world(seed: int) -> list[list[Script]]:
    """Groups of sessions: group ids task0, task1, …"""
    random = Random(seed)
    take = RandomChoices(random)
    return [
        [
            make_script(take, f"task{group}/{member}/0/1", max_calls=3, max_step=5)
            for member in range(random.randint(1, 3))
        ]
        for group in range(random.randint(1, 5))
    ]
