"""HTTP client of one inference engine: a few questions, one kind of call.

Invariant: an error says how far the request came.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from polar.core.dialects.engine_answer import AnswerError, load_json
from polar.core.dialects.engine_body import ReasoningField, name_reasoning
from polar.errors import EngineError
from polar.gateway.upstream import (
    CONNECT_SECONDS,
    BrokenOffError,
    Origin,
    Response,
    UnreachableError,
    Upstream,
)

PROBE_HEADERS: Mapping[str, str] = {"X-Polar-Purpose": "probe"}
_QUESTION_SECONDS = 10.0


class EngineDownError(EngineError):
    """No connection to the engine."""


class EngineBrokenError(EngineError):
    """The engine broke off after the request was sent."""


class EngineStatusError(EngineError):
    """The engine answered a question with an error status."""

    def __init__(self, message: str, status: int, data: bytes) -> None:
        super().__init__(message)
        self.status = status
        self.data = data


class EngineHttp:
    """A gateway's connections to engines: unlimited, kept alive, no proxies from the environment."""

    def __init__(self) -> None:
        self.calls = Upstream()
        self.questions = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_QUESTION_SECONDS, sock_connect=CONNECT_SECONDS),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections."""
        self.calls.close()
        await self.questions.close()


class EngineCall(AbstractAsyncContextManager[Response]):
    """One chat request: entering sends it, leaving closes what was not read.

    Raises EngineDownError or EngineBrokenError before and while the body is read.
    """

    def __init__(
        self, engine_id: str, upstream: Upstream, origin: Origin, data: bytes, headers: Mapping[str, str]
    ) -> None:
        self._engine_id = engine_id
        self._upstream = upstream
        self._origin = origin
        self._data = data
        self._headers = headers
        self._response: Response

    async def __aenter__(self) -> Response:
        data, self._data = self._data, b""  # not needed while the answer is waited for
        try:
            self._response = await self._upstream.post(self._origin, data, self._headers)
        except UnreachableError as error:
            raise EngineDownError(f"engine {self._engine_id} cannot be reached: {error}") from error
        except BrokenOffError as error:
            raise self._broken(error) from error
        return self._response

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A body that was not read to its end costs the connection, and tells the engine at once that
        # nobody wants the rest.
        self._response.release()
        if isinstance(error, BrokenOffError):
            raise self._broken(error) from error

    def _broken(self, error: BrokenOffError) -> EngineBrokenError:
        return EngineBrokenError(f"engine {self._engine_id} broke off: {error}")


class EngineClient:
    """One server that speaks OpenAI's chat form."""

    def __init__(
        self,
        engine_id: str,
        url: str,
        http: EngineHttp,
        *,
        api_key: str = "",
        reasoning_field: ReasoningField = "reasoning",
    ) -> None:
        """`url`: without /v1. `api_key`: what the server wants as Bearer token, if it wants one.
        `reasoning_field`: what it calls the reasoning of earlier answers. Raises ValueError for a URL
        that is none."""
        self.engine_id = engine_id
        self.url = url
        self._http = http
        self._reasoning_field = reasoning_field
        self._key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._origin = Origin.of(url, "/v1/chat/completions", self._key)

    def chat(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> EngineCall:
        """Send a chat request; see EngineCall."""
        data = orjson.dumps(name_reasoning(body, self._reasoning_field))
        return EngineCall(self.engine_id, self._http.calls, self._origin, data, headers)

    async def models(self) -> dict[str, int | None]:
        """Names that the engine serves, and the tokens of their contexts where it tells them."""
        listed = await self._ask("/v1/models")
        return {
            str(model.get("id")): length if isinstance(length := model.get("max_model_len"), int) else None
            for model in listed.get("data", ())
        }

    async def weight_version(self) -> str:
        """The engine's own word for its weights; `default` where it keeps none."""
        try:
            return str((await self._ask("/weight_info")).get("weight_version"))
        except EngineStatusError as error:
            if error.status in (404, 405):
                return "default"
            raise

    async def count_tokens(self, body: Mapping[str, Any]) -> int:
        """Prompt tokens of a chat request. Raises EngineStatusError with the engine's answer."""
        counted = (await self._ask("/tokenize", name_reasoning(body, self._reasoning_field))).get("count")
        if not isinstance(counted, int):
            raise EngineBrokenError(f"engine {self.engine_id} does not count tokens")
        return counted

    async def is_healthy(self) -> bool:
        """Whether the engine says so."""
        try:
            async with self._http.questions.get(f"{self.url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            async with self._http.questions.request(
                "GET" if body is None else "POST",
                self.url + path,
                data=None if body is None else orjson.dumps(body),
                headers={**self._key, **PROBE_HEADERS},
            ) as response:
                data = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineDownError(f"engine {self.engine_id} cannot be reached: {error!r}") from error
        if status != 200:
            raise EngineStatusError(f"engine {self.engine_id} answers {status} to {path}", status, data)
        try:
            answer = load_json(data)
        except AnswerError as error:
            raise EngineBrokenError(f"engine {self.engine_id}: {error}") from error
        if not isinstance(answer, dict):
            raise EngineBrokenError(f"engine {self.engine_id} answers no JSON object to {path}")
        return answer
