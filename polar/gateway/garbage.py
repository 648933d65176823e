"""Python's collector of reference cycles, so that no call waits for it.

A call makes thousands of objects, and its way through the gateway no cycles; what it leaves (a session's
history, answers that are kept) lives for long. By default the collector looks through that again and
again, for 50 to 150 ms at a time, and finds nothing. Here it runs when nothing is in flight, and at the
latest after ten minutes: what failed calls leave (an error that knows its own frames) waits so long.
"""

import asyncio
import gc
from collections.abc import Callable

_LOOK_SECONDS = 10.0
_IDLE_LOOKS = 6
"""Looks after which a quiet moment is used."""
_MOST_LOOKS = 60
"""Looks after which it is done in any case."""


def calm() -> None:
    """Stop the collector; once, when everything is loaded. `sweep_when_idle` does its work from then on."""
    gc.collect()
    gc.freeze()
    gc.disable()


async def sweep_when_idle(is_idle: Callable[[], bool]) -> None:
    """Collect cycles in quiet moments, for ever."""
    looks = 0
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        looks += 1
        if looks >= _MOST_LOOKS or (looks >= _IDLE_LOOKS and is_idle()):
            looks = 0
            gc.collect()
