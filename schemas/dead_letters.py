"""polar.dead-letters.v1: raw bytes as value; everything known about them in headers."""

from schemas.base import WireModel


class DeadLetter(WireModel):
    """Headers of a dead letter (all as UTF-8 text) with the raw value beside them."""

    source_topic: str
    source_partition: int
    source_offset: int
    stage: str
    """Who refused it."""
    reason: str
    """`not_json`, `unknown_type`, `schema_version`, `invalid`, `late_call`, `late_reward`, …"""
    detail: str = ""
