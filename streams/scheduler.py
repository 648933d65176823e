"""The scheduler: tasks, sessions, heartbeats and group decisions → placements.

The rollout API is served beside it, from the same core.
"""

from functools import partial

from faststream import FastStream

from polar.core.scheduling import INPUTS, READ_FROM_BEGINNING, SchedulerCore
from polar.core.scheduling_state import SchedulingLimits
from polar.kafka.stage import stage_app
from polar.rollout.api import serve_api
from polar.settings import LogSettings, SchedulerSettings


def create_app(log: LogSettings, settings: SchedulerSettings) -> FastStream:
    """The app of `polar scheduler`."""
    core = SchedulerCore(
        SchedulingLimits(
            ready_target=settings.ready_target,
            node_timeout=settings.node_timeout_seconds,
            gateway_timeout=settings.gateway_timeout_seconds,
            max_open_tasks=settings.max_open_tasks,
        )
    )
    return stage_app(
        log,
        core,
        INPUTS,
        group_id=f"{log.topic_prefix}.scheduler",
        start_at_beginning=READ_FROM_BEGINNING,
        also_run=[partial(serve_api, core, settings)],
    )
