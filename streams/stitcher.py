"""polar.calls.v1 → polar.trajectories.v1: one Trajectory a session, when it closes."""

from faststream import FastStream

from polar.core.stitcher_stage import StitcherCore
from polar.kafka.stage import stage_app
from polar.settings import LogSettings, StreamSettings
from schemas.topics import CALLS
from schemas.trajectories import UsabilityRules


def create_app(log: LogSettings, settings: StreamSettings) -> FastStream:
    """The stitcher; any number of processes share the partitions."""
    core = StitcherCore(
        max_open_sessions=settings.max_open_sessions,
        idle_seconds=settings.session_idle_seconds,
        rules=UsabilityRules(train_kinds=settings.train_kinds, vocabulary=settings.vocabulary),
    )
    return stage_app(log, core, (CALLS,), group_id=f"{log.topic_prefix}.stitcher")
