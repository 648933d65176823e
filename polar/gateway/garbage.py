"""Python's collector of reference cycles, so that no call waits for it.

A call makes thousands of objects and next to no cycles; what it leaves (a session's history, answers
that are kept) lives for long. By default the collector looks through all of that again and again, for
50 to 150 ms at a time. Here it looks at new objects only, a few at a time, and takes what survives out of its
sight. Cycles among that are found when nothing is in flight, or after an hour.
"""

import asyncio
import gc
from collections.abc import Callable, Mapping
from typing import Any

_YOUNG = 10_000
"""New containers after which they are looked through: about 10 ms, every few hundred calls."""
_NEVER = 1_000_000
_LOOK_SECONDS = 60.0
_MOST_LOOKS = 60
"""After so many minutes all is looked through, calls in flight or not."""


def calm() -> None:
    """Set the collector up; once, when everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 1, _NEVER)
    if _freeze_survivors not in gc.callbacks:
        gc.callbacks.append(_freeze_survivors)


def sweep() -> int:
    """Look through everything; returns how many objects were part of unreachable cycles."""
    gc.unfreeze()
    found = gc.collect()
    gc.freeze()
    return found


async def sweep_when_idle(is_idle: Callable[[], bool]) -> None:
    """Sweep in quiet minutes, for ever."""
    looks = 0
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        looks += 1
        if is_idle() or looks >= _MOST_LOOKS:
            looks = 0
            sweep()


def _freeze_survivors(phase: str, info: Mapping[str, Any]) -> None:
    if phase == "stop" and info["generation"] == 1:
        gc.freeze()
