"""The rollout API: tasks in over HTTP, their state out of the scheduler's core.

| route | answer |
|---|---|
| POST /tasks | 202 once the task is on the log; 200 when that task_id is known already |
| GET /tasks, GET /tasks/ID | state, members with outcomes, state of the group |
| DELETE /tasks/ID | 202 once the cancellation is on the log |
| GET /nodes | nodes as last heard |
| GET /health | 200 while the process lives, with what the scheduler does |

Errors are `{"error": {"type", "message", "remedy", …}}`: 4xx say what to type instead, 429
comes at `max_open_tasks`, 503 when the broker does not answer. It runs in the scheduler's
process and reads its core between two records; it decides nothing.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polar.core.scheduling import SchedulerCore
from polar.core.scheduling_views import view_nodes, view_task, view_tasks
from polar.errors import LogUnavailableError, RecordTooLargeError, SettingsError
from polar.kafka.writer import LogWriter
from polar.rollout.requests import BadRequestError, parse_task, refuse
from polar.settings import SchedulerSettings
from schemas.base import Event
from schemas.tasks import RolloutTask, TaskCancelled

logger = logging.getLogger(__name__)

_MAX_LISTED = 1000


class RolloutApi:
    """Handlers over a core and a writer of the same event loop."""

    def __init__(self, core: SchedulerCore, writer: LogWriter, max_open_tasks: int) -> None:
        self._core = core
        self._writer = writer
        self._max_open_tasks = max_open_tasks
        self._accepted: set[str] = set()
        """Tasks on the log, or on their way, that the core has not read yet."""

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/tasks", self._answering(self.submit), methods=["POST"]),
                Route("/tasks", self._answering(self.list_tasks), methods=["GET"]),
                Route("/tasks/{task_id}", self._answering(self.get_task), methods=["GET"]),
                Route("/tasks/{task_id}", self._answering(self.cancel_task), methods=["DELETE"]),
                Route("/nodes", self._answering(self.list_nodes), methods=["GET"]),
                Route("/health", self._answering(self.health), methods=["GET"]),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    async def submit(self, request: Request) -> Response:
        """POST /tasks."""
        spec = parse_task(request.headers.get("content-type", ""), await request.body())
        task_id = spec.task_id or f"task-{secrets.token_hex(8)}"
        known = self._state_of(task_id)
        if known is not None:
            return JSONResponse({"task_id": task_id, "state": known})
        if len(self._core.book.tasks) + len(self._unread()) >= self._max_open_tasks:
            raise refuse(
                429,
                "too_many_open_tasks",
                f"{self._max_open_tasks} tasks are open",
                remedy="wait for tasks to finish, or raise POLAR_SCHEDULER_MAX_OPEN_TASKS",
            )
        self._accepted.add(task_id)
        task = RolloutTask(task_id=task_id, spec=spec.model_copy(update={"task_id": task_id}))
        try:
            await self._write(task, f"submit it again with task_id {task_id!r}: it will still be one task")
        except BaseException:
            self._accepted.discard(task_id)
            raise
        logger.info("task %s accepted, %d samples", task_id, spec.num_samples)
        return JSONResponse({"task_id": task_id, "state": "accepted"}, status_code=202)

    async def get_task(self, request: Request) -> Response:
        """GET /tasks/ID."""
        task_id = request.path_params["task_id"]
        view = view_task(self._core, task_id)
        if view is not None:
            return JSONResponse(_plain(view))
        state = self._state_of(task_id)
        if state is None:
            raise self._unknown(task_id)
        return JSONResponse({"task_id": task_id, "state": state, "members": []})

    async def list_tasks(self, request: Request) -> Response:
        """GET /tasks?state=S&limit=N: without the members."""
        wanted = request.query_params.get("state")
        limit = request.query_params.get("limit", str(_MAX_LISTED))
        if not limit.isdigit():
            raise refuse(400, "invalid_limit", f"limit={limit!r}", remedy="give a number")
        views = (view for view in view_tasks(self._core) if wanted in (None, view.state))
        tasks = []
        for view in itertools.islice(views, min(int(limit), _MAX_LISTED)):
            row = _plain(view)
            del row["members"]
            tasks.append(row)
        return JSONResponse({"tasks": tasks, "accepted": self._unread()})

    async def cancel_task(self, request: Request) -> Response:
        """DELETE /tasks/ID?reason=R."""
        task_id = request.path_params["task_id"]
        state = self._state_of(task_id)
        if state is None:
            raise self._unknown(task_id)
        if state in ("finished", "cancelling"):
            return JSONResponse({"task_id": task_id, "state": state})
        reason = request.query_params.get("reason", "cancelled over the rollout API")[:200]
        await self._write(TaskCancelled(task_id=task_id, reason=reason), "send the request again")
        return JSONResponse({"task_id": task_id, "state": "cancelling"}, status_code=202)

    async def list_nodes(self, _: Request) -> Response:
        """GET /nodes."""
        return JSONResponse({"nodes": [_plain(view) for view in view_nodes(self._core, time.time())]})

    async def health(self, _: Request) -> Response:
        """GET /health."""
        return JSONResponse({"status": "alive", "scheduler": dict(self._core.metrics())})

    # -- parts --------------------------------------------------------------------------------

    def _unread(self) -> list[str]:
        """Accepted tasks that the core has not read; those that it has are forgotten."""
        core = self._core
        for task_id in [i for i in self._accepted if i in core.book.tasks or core.finished.is_fixed(i)]:
            self._accepted.discard(task_id)
        return sorted(self._accepted)

    def _state_of(self, task_id: str) -> str | None:
        view = view_task(self._core, task_id)
        if view is not None:
            return view.state
        if self._core.finished.is_fixed(task_id):
            return "finished"
        return "accepted" if task_id in self._accepted else None

    def _unknown(self, task_id: str) -> BadRequestError:
        return refuse(
            404,
            "unknown_task",
            f"no task {task_id!r} is open, or it finished too long ago",
            remedy="GET /tasks lists what is known",
        )

    async def _write(self, event: Event, remedy: str) -> None:
        try:
            await self._writer.write(event)
        except RecordTooLargeError as error:
            raise refuse(413, "too_large", str(error), remedy="make the task smaller") from error
        except LogUnavailableError as error:
            raise refuse(503, "log_unavailable", str(error), remedy=remedy) from error

    def _answering(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except BadRequestError as error:
                headers = {"retry-after": "1"} if error.status in (429, 503) else None
                return JSONResponse({"error": error.error}, status_code=error.status, headers=headers)

        return answer


async def serve_api(core: SchedulerCore, settings: SchedulerSettings, writer: LogWriter) -> None:
    """Serve until cancelled. Raises SettingsError when the port is taken."""
    try:
        listening = socket.create_server((settings.host, settings.port))
    except OSError as error:
        raise SettingsError(
            f"the rollout API cannot listen on {settings.host}:{settings.port} ({error}); "
            "set POLAR_SCHEDULER_PORT to a free port"
        ) from error
    api = RolloutApi(core, writer, settings.max_open_tasks)
    server = _QuietServer(
        uvicorn.Config(
            api.app(),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=3,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        listening.close()


class _QuietServer(uvicorn.Server):
    """Leaves the signals to the stage that it runs beside."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _plain(view: Any) -> dict[str, Any]:
    row = dataclasses.asdict(view)
    return {
        name: value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        for name, value in row.items()
    }


async def _http_error(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "internal error"
    body = {"type": "http_error", "message": detail, "remedy": "see the routes in polar/rollout/api.py"}
    return JSONResponse({"error": body}, status_code=status)
