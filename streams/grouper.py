"""Trajectories, rewards and group events → polar.groups.v1, and its decision GroupSealed."""

from faststream import FastStream

from polar.core.advantages import AdvantageRule
from polar.core.grouper_stage import TOPICS, GrouperCore, GrouperWaits
from polar.kafka.stage import stage_app
from polar.settings import LogSettings, StreamSettings


def create_app(log: LogSettings, settings: StreamSettings) -> FastStream:
    """The grouper; any number of processes share the partition numbers."""
    core = GrouperCore(
        max_open_groups=settings.max_open_groups,
        # A session that does not end is given up by the stitcher after the same time, so a
        # trajectory that is announced comes by then.
        waits=GrouperWaits(trajectory=settings.session_idle_seconds + 60),
        rule=AdvantageRule(estimator=settings.estimator),
    )
    return stage_app(log, core, TOPICS, group_id=f"{log.topic_prefix}.grouper")
