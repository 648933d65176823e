"""polar.engines.v1."""

from typing import Literal

from schemas.base import Event
from schemas.policies import PolicyVersion


class EngineState(Event):
    """Which weights an engine runs, as weight-sync established it."""

    type: Literal["EngineState"] = "EngineState"
    engine_id: str
    url: str
    policy: str
    version: PolicyVersion | None
    status: Literal["ready", "failed"]
    reason: str = ""
    checksum: str = ""
    """The engine's own checksum over its loaded parameters."""
    canary_gap: float | None = None
    """Largest |engine − trainer| log-prob difference on the canary prompt."""
    load_seconds: float = 0.0
    paused_seconds: float = 0.0
