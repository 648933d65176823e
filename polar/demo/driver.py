"""Submits the demo's tasks as the log says it is time, until all batches are trained and loaded.

| loop | waits for | unblocked by |
|---|---|---|
| follow the log | tasks, batches, policies, engine states | rollout API, packer, trainer, weight-sync |
| submit | the rollout API to accept | the scheduler |

Invariant: the only state is a fold over the log (polar.demo.pacing), so a driver may die at any
moment.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import httpx

from polar.demo.pacing import Plan, Progress
from polar.demo.tasks import make_task
from polar.errors import PolarError
from polar.kafka.reader import follow
from polar.settings import LogSettings
from schemas.tasks import TaskRequest
from schemas.topics import BATCHES, ENGINES, POLICIES, TASKS

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_REFUSED = frozenset({400, 401, 403, 404, 405, 409, 413, 422})
"""Answers of the rollout API that no repetition changes."""


class TaskRefusedError(PolarError):
    """The rollout API does not take a task of the demo."""


async def drive(
    settings: LogSettings,
    plan: Plan,
    *,
    api_url: str,
    kind: str,
    journal: Path,
    reward_program: bool,
    on_progress: Callable[[Progress], None],
) -> Progress:
    """Run until the plan is done; the final state. Outages of broker and API are waited out.

    Raises TaskRefusedError.
    """
    progress = Progress(plan)
    asked: set[tuple[int, int]] = set()
    async with httpx.AsyncClient(base_url=api_url, trust_env=False, timeout=10) as api:
        # The engines' topic last: a version is of use only when its PolicyPublished is known.
        async for record in follow(settings, TASKS, BATCHES, POLICIES, ENGINES):
            progress.on_event(record.event)
            on_progress(progress)
            if progress.is_done:
                return progress
            for step, index in progress.wanted_tasks():
                if (step, index) in asked:
                    continue
                asked.add((step, index))
                await _submit(
                    api,
                    make_task(
                        kind,
                        seed=plan.seed,
                        step=step,
                        index=index,
                        journal=journal,
                        reward_program=reward_program,
                    ),
                )
    return progress


async def _submit(api: httpx.AsyncClient, task: TaskRequest) -> None:
    body = task.model_dump(mode="json")
    while True:
        try:
            answer = await api.post("/tasks", json=body)
        except httpx.HTTPError as error:
            logger.warning("the rollout API does not answer (%r), trying on", error)
        else:
            if answer.is_success:
                return
            if answer.status_code in _REFUSED:
                raise TaskRefusedError(f"POST /tasks: {answer.status_code} {answer.text[:500]}")
            logger.warning("POST /tasks: %d, trying on", answer.status_code)
        await asyncio.sleep(_RETRY_SECONDS)
