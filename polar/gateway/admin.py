"""The admin API: nodes open and seal sessions, weight-sync announces versions, people drain engines.

Every route needs the administrators' token, which is derived from the shared secret. Answers
mean what they say: `opened` stands on the log, `calls` of a seal is on the log or fsynced, an engine
that drains does so after a restart, too.
"""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polar.core.session_keys import admin_token
from polar.gateway.parts import Parts
from polar.gateway.responses import HttpError, unauthorized, unavailable
from polar.gateway.sessions import SessionRefusedError
from polar.gateway.versions import Phase
from schemas.policies import PolicyVersion
from schemas.sessions import Outcome
from schemas.tasks import SamplingSpec

_MAX_LISTED = 1000
_MAX_BODY_BYTES = 64 * 1024


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OpenSession(_Body):
    """Body of POST /admin/sessions/open."""

    session_id: str
    group_id: str
    sampling: SamplingSpec = SamplingSpec()
    trainable: bool = True
    expires_at: float
    """Unix seconds; as in the session's key."""


class SealSession(_Body):
    """Body of POST /admin/sessions/seal."""

    session_id: str
    outcome: Outcome
    reason: str = ""


class EnginePolicy(_Body):
    """Body of POST /admin/engines/policy."""

    engine_id: str
    phase: Phase
    version: PolicyVersion


class DrainEngine(_Body):
    """Body of POST /admin/engines/drain."""

    engine_id: str
    is_draining: bool = True
    """False: it takes calls again."""


AnyBody = TypeVar("AnyBody", bound=_Body)


def admin_routes(parts: Parts, secret: bytes) -> list[Route]:
    """The routes, all closed without the token."""
    expected = f"Bearer {admin_token(secret)}".encode()

    def guarded(
        handler: Callable[[Request], Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, expected):
                raise unauthorized("this needs the administrators' token", "invalid_admin_token")
            try:
                return await handler(request)
            except OSError as error:
                raise unavailable(f"the spool cannot be written: {error}", "spool_error") from error

        return checked

    async def open_session(request: Request) -> Response:
        body = await _read(request, OpenSession)
        try:
            record_id = parts.sessions.open(
                body.session_id, body.group_id, body.sampling, body.expires_at, trainable=body.trainable
            )
        except SessionRefusedError as error:
            raise HttpError(409, str(error), kind="invalid_request_error", code="session_sealed") from error
        parts.sender.wake()
        try:
            await asyncio.wait_for(parts.sender.acknowledged(record_id), parts.log.send_timeout_seconds)
        except TimeoutError as error:
            raise unavailable(
                f"the broker has not acknowledged the opening: {parts.sender.trouble or 'no answer'}",
                "broker_down",
            ) from error
        return JSONResponse({"opened": True})

    async def seal_session(request: Request) -> Response:
        body = await _read(request, SealSession)
        try:
            calls, record_id = await parts.sessions.seal(
                body.session_id, body.outcome, body.reason,
                wait_seconds=parts.settings.seal_wait_seconds, now=time.time(),
            )  # fmt: skip
        except ValueError as error:
            raise HttpError(400, str(error), kind="invalid_request_error", param="session_id") from error
        parts.retries.forget(body.session_id)
        parts.sender.wake()
        try:
            await parts.recorder.on_log(record_id)
        except OSError as error:
            raise unavailable(f"the seal cannot be kept: {error}", "spool_error") from error
        return JSONResponse({"calls": calls})

    async def engine_policy(request: Request) -> Response:
        body = await _read(request, EnginePolicy)
        if not parts.engines.tell(body.engine_id, body.phase, body.version):
            raise unknown_engine(body.engine_id)
        return JSONResponse({"ok": True})

    async def drain_engine(request: Request) -> Response:
        body = await _read(request, DrainEngine)
        slot = parts.drains.set(body.engine_id, is_draining=body.is_draining)
        if slot is None:
            raise unknown_engine(body.engine_id)
        return JSONResponse({"draining": slot.is_draining, "in_flight": slot.in_flight})

    def unknown_engine(engine_id: str) -> HttpError:
        return HttpError(
            404,
            f"no engine {engine_id!r} here, only {', '.join(parts.engines.slots)}",
            kind="invalid_request_error",
            code="unknown_engine",
        )

    async def state(_: Request) -> Response:
        return JSONResponse(describe(parts))

    return [
        Route("/admin/sessions/open", guarded(open_session), methods=["POST"]),
        Route("/admin/sessions/seal", guarded(seal_session), methods=["POST"]),
        Route("/admin/engines/policy", guarded(engine_policy), methods=["POST"]),
        Route("/admin/engines/drain", guarded(drain_engine), methods=["POST"]),
        Route("/admin/state", guarded(state), methods=["GET"]),
    ]


def describe(parts: Parts) -> dict[str, Any]:
    """What the gateway holds at this moment."""
    return {
        "gateway_id": parts.settings.id,
        "open_sessions": parts.spool.open_sessions(_MAX_LISTED),
        "num_open_sessions": parts.spool.num_open,
        "in_flight": parts.sessions.num_in_flight,
        "spool": {
            "records": parts.spool.num_records,
            "bytes": parts.spool.size_bytes,
            "refused": parts.sender.refused,
            "trouble": parts.sender.trouble,
        },
        "retries": {
            "kept": parts.retries.num_kept,
            "bytes": parts.retries.kept_bytes,
            "joined": parts.retries.num_joined,
            "repeated": parts.retries.num_repeated,
        },
        "current_version": str(parts.engines.current.version),
        "calls_waiting_for_engine": parts.engines.num_waiting,
        "engines": {
            slot.engine_id: {
                "url": slot.client.url,
                "fit": not slot.reason,
                "reason": slot.reason,
                "detail": slot.detail,
                "in_flight": slot.in_flight,
                "takes_ids": not slot.rendering,
                "renders_itself_because": slot.rendering,
                "draining": slot.is_draining,
                "behind": parts.engines.is_behind(slot),
                "settled": str(slot.versions.settled),
                "pending": None if slot.versions.pending is None else str(slot.versions.pending),
            }
            for slot in parts.engines.slots.values()
        },
        "prompts": {
            "no_renderer_because": parts.prompts.trouble,
            "relation": dict(parts.prompts.relations),
            "rendering": dict(parts.prompts.renderings),
            "why_engine": dict(parts.prompts.engine_reasons),
            "cut_tokens": parts.prompts.cut_tokens,
        },
        "counters": dict(parts.recorder.counters)
        | {f"refused_{status}": count for status, count in parts.proxy.refusals.items()},
    }


async def _read(request: Request, model: type[AnyBody]) -> AnyBody:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _MAX_BODY_BYTES:
            raise HttpError(413, f"the body is over {_MAX_BODY_BYTES} bytes", kind="invalid_request_error")
    try:
        return model.model_validate_json(bytes(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise HttpError(
            400,
            f"{where}: {first['msg']}".removeprefix(": "),
            kind="invalid_request_error",
            param=where or None,
        ) from error
