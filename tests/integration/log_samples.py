"""Events for the integration tests of the log."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

from polar.core.stage import Emit
from schemas import export
from schemas.base import Event
from schemas.codec import decode
from schemas.group_events import GroupSealed
from schemas.rewards import Reward
from schemas.topics import MODEL_OF, TOPIC_OF

HISTORY = Path(export.__file__).with_name("history")


def every_event() -> list[Event]:
    """One event of each type, from the frozen samples."""
    events: dict[str, Event] = {}
    for path in sorted(HISTORY.glob("*.json")):
        data = path.read_bytes()
        model = MODEL_OF[json.loads(data)["type"]]
        events[model.__name__] = decode(data, TOPIC_OF[model])
    return list(events.values())


def reward(number: int, *, groups: int = 7, text: str = "") -> Reward:
    """The reward with id `r<number>`, in one of `groups` groups."""
    return Reward(
        reward_id=f"r{number}",
        session_id="g/0/0/0",
        group_id=f"g{number % groups}",
        name="score",
        value=1.0,
        evaluator="test",
        details={"text": text} if text else {},
    )


def rewards(count: int, *, start: int = 0, groups: int = 7) -> list[Emit]:
    return [Emit(reward(start + number, groups=groups)) for number in range(count)]


def seal_of(event: Reward) -> GroupSealed:
    """What the test stages make of a reward."""
    return GroupSealed(
        group_id=event.group_id, trajectory_ids=(), reward_ids=(event.reward_id,), reason="complete"
    )


async def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait for a condition; fails with `what`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.02)
