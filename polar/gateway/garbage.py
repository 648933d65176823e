"""Python's collector of reference cycles, so that no call waits for it.

A call makes thousands of objects, and its way through the gateway no cycles; what it leaves (a session's
history, answers that are kept) lives for long. By default the collector looks through that again and
again, for 50 to 150 ms at a time, and finds nothing. Here it runs when nothing is in flight, and at the
latest after ten minutes: what failed calls leave (an error that knows its own frames) waits so long.
What a quiet moment's run finds alive is not looked at by the next ones, which else take longer with every
open session: cycles among that wait for a run that looks at everything.
"""

import asyncio
import gc
from collections.abc import Callable

_LOOK_SECONDS = 10.0
_IDLE_LOOKS = 6
"""Looks after which a quiet moment is used."""
_MOST_LOOKS = 60
"""Looks after which it is done in any case."""
_FULL_SWEEPS = 60
"""Of so many runs one looks at everything: about once an hour where there are quiet moments."""


def calm() -> None:
    """Stop the collector; once, when everything is loaded. `sweep_when_idle` does its work from then on."""
    gc.collect()
    gc.freeze()
    gc.disable()


async def sweep_when_idle(is_idle: Callable[[], bool]) -> None:
    """Collect cycles in quiet moments, for ever."""
    looks = sweeps = 0
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        looks += 1
        idle = is_idle()
        if looks < (_IDLE_LOOKS if idle else _MOST_LOOKS):
            continue
        looks, sweeps = 0, sweeps + 1
        if sweeps % _FULL_SWEEPS == 0:
            gc.unfreeze()
        gc.collect()
        if idle:
            gc.freeze()
