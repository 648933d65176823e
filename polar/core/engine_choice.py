"""Which engine a call goes to: its session's, unless that one is far busier than the others.

Rendezvous hashing with bounded loads. Invariant: the choice is a function of the arguments, so a
gateway that was restarted chooses as before; an engine that comes or goes moves only sessions
that were, or now are, its own; no session begins on an engine with more than its share.
"""

import hashlib
from collections.abc import Mapping

_SLACK = 1.25
"""A session begins on an engine only below this multiple of the mean load."""
_PATIENCE = 2
"""A session leaves its engine, and the prefixes cached there, at so many times that bound."""


def choose_engine(session_id: str, loads: Mapping[str, int], stays_with: str | None = None) -> str:
    """Id of an engine; `loads`: calls in flight by id of those that may be used, at least one.

    `stays_with`: the engine of the session's last call.
    """
    if len(loads) == 1:
        return next(iter(loads))
    bound = _SLACK * (sum(loads.values()) + 1) / len(loads)
    if stays_with is not None and loads.get(stays_with, bound * _PATIENCE) < bound * _PATIENCE:
        return stays_with
    # The mean is below the bound, so at least one engine is.
    return max(
        (engine_id for engine_id, load in loads.items() if load < bound),
        key=lambda engine_id: hashlib.sha256(f"{engine_id} {session_id}".encode()).digest(),
    )
