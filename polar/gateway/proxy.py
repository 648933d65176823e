"""One chat call: admit, dispatch, pass on, record, end.

    harness ──▶ admit ──▶ reserve seq ──▶ engine ══▶ chunks flow at once ══▶ harness
                  │ 401 · 400 · 413 · 429 · 503      │ last chunk held back
                  ▼ nothing was dispatched           ▼
                refused                       record → spool → broker ack, or fsync → end of answer

| waits for | who unblocks it |
|---|---|
| the engine | its answer, or the client's leaving, a seal, a shutdown: all cancel the call |
| the client's reading | the same |
| the record | the broker within the grace, else the disk |

Invariant: from the reservation on, exactly one record per number is spooled, and the harness
sees the end of an answer only after that record is durable.
"""

import asyncio
import contextlib
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, MutableMapping
from typing import Any

from polar.core.dialects.chat import ChatRequest, RequestError, engine_body, parse_request
from polar.core.session_keys import InvalidKeyError, SessionClaims, validate
from polar.gateway.engines import EnginePool, EngineSlot
from polar.gateway.exchange import Exchange
from polar.gateway.recorder import Recorder
from polar.gateway.responses import (
    HttpError,
    Receive,
    Send,
    read_body,
    send_error,
    unauthorized,
    unavailable,
)
from polar.gateway.sessions import LiveSession, SessionRefusedError, SessionTable
from polar.gateway.spool import Spool
from polar.settings import GatewaySettings


def authenticate(
    secret: bytes, gateway_id: str, headers: Mapping[bytes, bytes], path_key: str | None, now: float
) -> SessionClaims:
    """Claims of a request's key: URL prefix, Bearer or x-api-key. Raises HttpError 401."""
    key = path_key or headers.get(b"x-api-key", b"").decode("latin-1")
    bearer = headers.get(b"authorization", b"").decode("latin-1")
    if not path_key and bearer.lower().startswith("bearer "):
        key = bearer[7:].strip()
    if not key:
        raise unauthorized(
            "no session key: send it as Authorization: Bearer, as x-api-key, or in the URL as /s/KEY/v1",
            "missing_api_key",
        )
    try:
        return validate(secret, key, gateway_id=gateway_id, now=now)
    except InvalidKeyError as error:
        code = "session_expired" if error.reason == "expired" else "invalid_api_key"
        raise unauthorized(str(error), code) from error


class ChatProxy:
    """POST …/chat/completions, as an ASGI application."""

    def __init__(
        self,
        settings: GatewaySettings,
        secret: bytes,
        spool: Spool,
        sessions: SessionTable,
        engines: EnginePool,
        recorder: Recorder,
    ) -> None:
        self._settings = settings
        self._secret = secret
        self._spool = spool
        self._sessions = sessions
        self._engines = engines
        self._recorder = recorder
        self._num_requests = 0
        self.refusals: Counter[int] = Counter()
        """Requests that never became a call, by HTTP status."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        self._num_requests += 1
        try:
            request, claims = await self._read(scope, receive)
            await self._run(claims, request, receive, send)
        except HttpError as error:
            self.refusals[error.status] += 1
            await send_error(send, error)
        except ConnectionError:
            return
        finally:
            self._num_requests -= 1

    async def _read(
        self, scope: MutableMapping[str, Any], receive: Receive
    ) -> tuple[ChatRequest, SessionClaims]:
        """The request and whose it is. Raises HttpError; ConnectionError when the client left."""
        headers = dict(scope["headers"])
        claims = authenticate(
            self._secret, self._settings.id, headers, scope["path_params"].get("key"), time.time()
        )
        self._admit(claims)
        if self._num_requests > 2 * self._settings.max_in_flight:
            raise self._too_many()
        raw = await read_body(receive, headers, self._settings.max_request_bytes)
        try:
            return parse_request(raw), claims
        except RequestError as error:
            raise HttpError(
                400, str(error), kind="invalid_request_error", code="invalid_request", param=error.param
            ) from error

    async def _run(self, claims: SessionClaims, request: ChatRequest, receive: Receive, send: Send) -> None:
        """Run the call until it ends or the client leaves."""
        work = asyncio.create_task(self._call(claims, request, send))
        gone = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            work.cancel("the client disconnected")
            await asyncio.wait({work})
        finally:
            gone.cancel()
            if not work.done():
                work.cancel("the gateway is stopping")
                await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    async def _call(self, claims: SessionClaims, request: ChatRequest, send: Send) -> None:
        """Admit and dispatch. Raises HttpError as long as nothing was dispatched."""
        live = self._admit(claims)
        slot = self._choose_engine(claims)
        body, used = engine_body(
            request, claims.sampling, trainable=claims.trainable, model=self._settings.model
        )
        try:
            call = self._sessions.begin(
                live, request, asyncio.current_task(), trainable=claims.trainable, sampling_used=used,
                engine_id=slot.engine_id, first_version=slot.versions.settled,
            )  # fmt: skip
        except sqlite3.Error as error:
            raise unavailable(f"the spool cannot be written: {error}", "spool_error") from error
        slot.in_flight += 1
        try:
            await Exchange(self._engines, self._recorder, live, slot, call, send).run(body)
        finally:
            slot.in_flight -= 1
            self._sessions.end(live, call)

    def _admit(self, claims: SessionClaims) -> LiveSession:
        try:
            return self._sessions.admit(claims)
        except SessionRefusedError as error:
            raise unauthorized(str(error), f"session_{error.reason}") from error

    def _choose_engine(self, claims: SessionClaims) -> EngineSlot:
        if self._sessions.num_in_flight >= self._settings.max_in_flight:
            raise self._too_many()
        if self._spool.size_bytes >= self._settings.spool_max_bytes:
            raise unavailable(
                "the spool is full because the broker takes no records; nothing is lost, try again later",
                "spool_full",
                retry_after=5,
            )
        slot = self._engines.choose(claims.session_id)
        if slot is None:
            reason, detail = self._engines.trouble or ("engine_down", "no engine is fit")
            raise unavailable(f"{reason}: {detail}", reason)
        return slot

    def _too_many(self) -> HttpError:
        return HttpError(
            429,
            f"{self._settings.max_in_flight} calls are in flight (POLAR_GATEWAY_MAX_IN_FLIGHT)",
            kind="rate_limit_error",
            code="too_many_calls",
            retry_after=1,
        )


async def _until_disconnect(receive: Receive) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
