"""One call of a model: admit, dispatch, pass on, record, end.

    harness ──▶ admit ──▶ reserve seq ──▶ engine ══▶ chunks flow at once ══▶ harness
                  │ 401 · 400 · 413 · 429 · 503      │ last chunk held back
                  ▼ nothing was dispatched           ▼
                refused                       record → spool → fsync, or broker ack → end of answer

| waits for | who unblocks it |
|---|---|
| the engine | its answer, or the client's leaving, a seal, a shutdown: all cancel the call |
| the client's reading | the same |
| the record | the disk or the broker; with many records under way the broker, after the grace the disk |

Invariant: from the reservation on, exactly one record per number is spooled, and the harness
sees the end of an answer only after that record is durable.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, MutableMapping
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qs

import orjson

from polar.core.dialects.base import Dialect, ModelRequest
from polar.core.dialects.body import RequestError
from polar.core.dialects.engine_answer import Captured
from polar.core.dialects.engine_body import count_body, engine_body
from polar.core.dialects.system_messages import system_first
from polar.core.session_budget import exhausted, tokens_left
from polar.core.session_keys import InvalidKeyError, SessionClaims, mask_keys, validate
from polar.core.token_limits import lower_limit
from polar.errors import EngineError
from polar.gateway.answers import Answer
from polar.gateway.engine import EngineStatusError
from polar.gateway.engines import EnginePool, EngineSlot, NoEngineError
from polar.gateway.exchange import Exchange
from polar.gateway.http_protocol import CONNECTION, Connection
from polar.gateway.prompts import Prompts, as_continuity, put_ids
from polar.gateway.recorder import Recorder
from polar.gateway.responses import (
    HttpError,
    Receive,
    Send,
    budget_spent,
    internal_error,
    read_body,
    refused_by_engine,
    send_error,
    send_json,
    unauthorized,
    unavailable,
)
from polar.gateway.retries import Retries, is_marked, retry_key
from polar.gateway.sessions import LiveSession, SessionRefusedError, SessionTable
from polar.gateway.spool import Spool
from polar.settings import GatewaySettings
from schemas.tasks import LimitSpec

logger = logging.getLogger(__name__)

_NO_LIMITS = LimitSpec()
_MAX_KEYS = 8192
"""Keys whose claims are remembered."""
Scope = MutableMapping[str, Any]


class Request:
    """What an ASGI scope says of one request, and what its URL says."""

    __slots__ = ("connection", "headers", "key", "query", "target")

    def __init__(self, scope: Scope, key: str = "", target: str = "") -> None:
        """`key`: a session key in the URL's path. `target`: the part of the URL behind `models/`."""
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.query: bytes = scope["query_string"]
        self.key = key
        self.target = target
        self.connection: Connection = scope[CONNECTION]


def authenticate(secret: bytes, gateway_id: str, request: Request, now: float) -> SessionClaims:
    """Claims of a request's key, wherever its harness puts it. Raises HttpError 401."""
    key = _key_of(request)
    if not key:
        raise unauthorized(
            "no session key: send it as Authorization: Bearer, x-api-key or x-goog-api-key, as ?key=, "
            "or in the URL as /s/KEY",
            "missing_api_key",
        )
    try:
        return _validated(secret, key, gateway_id).at(now)
    except InvalidKeyError as error:
        code = "session_expired" if error.reason == "expired" else "invalid_api_key"
        raise unauthorized(str(error), code) from error


@lru_cache(maxsize=_MAX_KEYS)
def _validated(secret: bytes, key: str, gateway_id: str) -> SessionClaims:
    """Every call of a session brings the same key. Errors are not remembered."""
    return validate(secret, key, gateway_id=gateway_id)


def _key_of(request: Request) -> str:
    """Of the URL's prefix, else of a header, else of the query; a Bearer before an x-api-key."""
    if request.key:
        return request.key
    bearer = request.headers.get(b"authorization", b"")
    if bearer[:7].lower() == b"bearer ":
        return bearer[7:].strip().decode("latin-1")
    for name in (b"x-api-key", b"x-goog-api-key"):
        if name in request.headers:
            return request.headers[name].decode("latin-1")
    return next(iter(parse_qs(request.query.decode("latin-1")).get("key", ())), "")


class ModelProxy:
    """Calls of all dialects."""

    def __init__(
        self,
        settings: GatewaySettings,
        secret: bytes,
        spool: Spool,
        sessions: SessionTable,
        engines: EnginePool,
        recorder: Recorder,
        retries: Retries,
        prompts: Prompts,
    ) -> None:
        self._settings = settings
        self._secret = secret
        self._spool = spool
        self._sessions = sessions
        self._engines = engines
        self._recorder = recorder
        self._retries = retries
        self._prompts = prompts
        self._num_requests = 0
        self.keep_alives = 0
        """Signs of life that were sent while nothing else came."""
        self.refusals: Counter[int] = Counter()
        """Requests that never became a call, by HTTP status."""

    async def sample(self, dialect: Dialect, asked: Request, receive: Receive, send: Send) -> None:
        """A model call: recorded, whatever becomes of it."""
        await self._guard(dialect, send, self._sample(dialect, asked, receive, send))

    async def count(self, dialect: Dialect, asked: Request, receive: Receive, send: Send) -> None:
        """How many prompt tokens a call would have; nothing is sampled, nothing recorded."""
        await self._guard(dialect, send, self._count(dialect, asked, receive, send))

    async def _guard(self, dialect: Dialect, send: Send, work: Coroutine[Any, Any, None]) -> None:
        self._num_requests += 1
        try:
            await work
        except HttpError as error:
            self.refusals[error.api.status] += 1
            await send_error(send, error, dialect)
        except ConnectionError:
            return
        finally:
            self._num_requests -= 1

    async def _sample(self, dialect: Dialect, asked: Request, receive: Receive, send: Send) -> None:
        request, claims = await self._read(dialect, asked, receive)
        seconds = self._settings.keep_alive_seconds
        key = retry_key(claims.session_id, request)
        answer = self._retries.find(key, is_marked=is_marked(asked.headers))
        if answer is not None:
            await answer.deliver(asked.connection, send, seconds)
            return
        answer = Answer(dialect, is_stream=request.stream, request_id=claims.session_id)
        self._retries.begin(key, answer)
        try:
            work = self._produce(claims, dialect, request, answer)
            await answer.make(work, asked.connection, send, seconds)
        finally:
            self._retries.end(key, answer)
            self.keep_alives += answer.keep_alives

    async def _count(self, dialect: Dialect, asked: Request, receive: Receive, send: Send) -> None:
        request, claims = await self._read(dialect, asked, receive)
        self._admit(claims)
        try:
            slot = self._engines.any_fit()
            tokens = await slot.client.count_tokens(count_body(request, model=self._settings.model))
        except EngineStatusError as error:
            raise refused_by_engine(error.status, error.data, None) from error
        except NoEngineError as error:
            raise unavailable(str(error), error.reason) from error
        except EngineError as error:
            raise unavailable(f"engine_down: {error}", "engine_down") from error
        await send_json(send, 200, dialect.counted(tokens))

    async def _read(
        self, dialect: Dialect, asked: Request, receive: Receive
    ) -> tuple[ModelRequest, SessionClaims]:
        """The request and whose it is. Raises HttpError; ConnectionError when the client left."""
        claims = authenticate(self._secret, self._settings.id, asked, time.time())
        self._admit(claims)
        if self._num_requests > 2 * self._settings.max_in_flight:
            self._retries.forget(claims.session_id)  # whatever it is, it may be no retry of those
            raise self._too_many()
        raw = mask_keys(
            await read_body(receive, asked.headers, self._settings.max_request_bytes, asked.connection)
        )
        try:
            request = dialect.parse_request(raw, asked.headers, asked.target)
        except RequestError as error:
            raise HttpError(
                400, str(error), kind="invalid_request_error", code="invalid_request", param=error.param
            ) from error
        return request if self._settings.system_anywhere else system_first(request), claims

    async def _produce(
        self, claims: SessionClaims, dialect: Dialect, request: ModelRequest, answer: Answer
    ) -> None:
        """Make the answer; whatever happens, it ends."""

        def fail(error: HttpError) -> None:
            answer.fail(error, dialect.stream(request, Captured()).failure(error.api))

        try:
            await self._call(claims, dialect, request, answer)
        except HttpError as error:
            self.refusals[error.api.status] += 1
            fail(error)
        except asyncio.CancelledError as cancelled:
            # By a seal or a shutdown, or because nobody is left who would read it.
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            fail(unavailable(str(cancelled) or "the call was cancelled", "call_cancelled"))
        except Exception as error:
            logger.exception("a call of session_id=%s failed inside the gateway", claims.session_id)
            fail(internal_error(error))

    async def _call(
        self, claims: SessionClaims, dialect: Dialect, request: ModelRequest, answer: Answer
    ) -> None:
        """Admit and dispatch. Raises HttpError as long as nothing was dispatched."""
        live = self._admit(claims)
        slot = await self._engine_for(live)
        # Waiting for an engine may have taken a while: the session may be sealed by now.
        live = self._admit(claims)
        budget = self._budget(claims, request)
        body, used = engine_body(
            request, claims.sampling, trainable=claims.trainable, model=self._settings.model,
            stream=request.stream or self._settings.always_stream,
        )  # fmt: skip
        lower_limit(body, used, context_tokens=slot.context_tokens, budget_tokens=budget)
        messages, tools = request.encoded_messages(), request.encoded_tools()
        planned = await self._prompts.plan(live, request, messages, tools, slot)
        if planned.rendering == "local":
            live = self._admit(claims)  # rendering may have taken a while, too
        if body.get("tools") is request.tools:
            body["tools"] = orjson.Fragment(tools.given)
        if planned.prompt is None:
            if self._settings.reasoning_field == "reasoning":  # else each message is spelled anew
                body["messages"] = orjson.Fragment(messages.text)
        else:
            put_ids(body, used, planned.prompt, slot.context_tokens)
        try:
            call = self._sessions.begin(
                live, request, asyncio.current_task(), trainable=claims.trainable, sampling_used=used,
                engine_id=slot.engine_id, logprobs_mode=slot.logprobs_mode,
                first_version=slot.versions.settled, messages=messages, tools=tools,
                continuity=as_continuity(planned), prompt=planned.prompt,
            )  # fmt: skip
        except OSError as error:
            raise unavailable(f"the spool cannot be written: {error}", "spool_error") from error
        slot.in_flight += 1
        try:
            await Exchange(self._engines, self._recorder, live, slot, call, planned, dialect, answer).run(
                body
            )
        finally:
            slot.in_flight -= 1
            self._sessions.end(live, call)

    def _admit(self, claims: SessionClaims) -> LiveSession:
        try:
            return self._sessions.admit(claims)
        except SessionRefusedError as error:
            raise unauthorized(str(error), f"session_{error.reason}") from error

    def _budget(self, claims: SessionClaims, request: ModelRequest) -> int | None:
        """Tokens that the call may sample, where the task sets a limit. Raises HttpError."""
        if claims.limits == _NO_LIMITS:
            return None
        used = self._sessions.used(claims.session_id)
        why = exhausted(
            claims.limits, used, choices=request.choices, now=time.time(), ends_at=claims.calls_end_at
        )
        if why is not None:
            raise budget_spent(
                f"the budget of session {claims.session_id} is spent: {why}; it takes no more calls",
                request.dialect,
            )
        return tokens_left(claims.limits, used)

    async def _engine_for(self, live: LiveSession) -> EngineSlot:
        if self._sessions.num_in_flight + self._engines.num_waiting >= self._settings.max_in_flight:
            raise self._too_many()
        if self._spool.size_bytes >= self._settings.spool_max_bytes:
            raise unavailable(
                "the spool is full because the broker takes no records; nothing is lost, try again later",
                "spool_full",
                retry_after=5,
            )
        try:
            return await self._engines.acquire(live.session_id, live.engine_id)
        except NoEngineError as error:
            raise unavailable(str(error), error.reason) from error

    def _too_many(self) -> HttpError:
        return HttpError(
            429,
            f"{self._settings.max_in_flight} calls are in flight (POLAR_GATEWAY_MAX_IN_FLIGHT)",
            kind="rate_limit_error",
            code="too_many_calls",
            retry_after=1,
        )
