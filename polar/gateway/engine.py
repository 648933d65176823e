"""HTTP client of one inference engine: a few questions, one kind of call.

Invariant: an error says how far the request came. Only a request that the engine cannot have
begun, or whose pooled connection was closed before a byte of answer, is sent a second time.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from polar.core.dialects.engine_answer import AnswerError, load_json
from polar.core.dialects.engine_body import ReasoningField, name_reasoning
from polar.errors import EngineError

PROBE_HEADERS: Mapping[str, str] = {"X-Polar-Purpose": "probe"}
_CONNECT_SECONDS = 5.0
_QUESTION_SECONDS = 10.0
_CHAT = "/v1/chat/completions"


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


def new_http_session() -> aiohttp.ClientSession:
    """The upstream connections of a gateway: unlimited, kept alive, no proxies from the environment."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        auto_decompress=True,
        trust_env=False,
    )


class EngineClient:
    """One server that speaks OpenAI's chat form."""

    def __init__(
        self,
        engine_id: str,
        url: str,
        http: aiohttp.ClientSession,
        *,
        api_key: str = "",
        reasoning_field: ReasoningField = "reasoning",
    ) -> None:
        """`url`: without /v1. `api_key`: what the server wants as Bearer token, if it wants one.
        `reasoning_field`: what it calls the reasoning of earlier answers."""
        self.engine_id = engine_id
        self.url = url
        self._http = http
        self._reasoning_field = reasoning_field
        self._key = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    @asynccontextmanager
    async def chat(
        self, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a chat request; the response with its body unread. Leaving closes what is not read.

        Raises EngineDownError or EngineBrokenError before and while the body is read.
        """
        data = orjson.dumps(name_reasoning(body, self._reasoning_field))
        try:
            response = await self._post(data, headers)
            try:
                yield response
            finally:
                # A body that was not read to its end costs the connection, and tells the engine
                # at once that nobody wants the rest.
                response.close() if not response.content.at_eof() else response.release()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineDownError(f"engine {self.engine_id} cannot be reached: {error}") from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineBrokenError(f"engine {self.engine_id} broke off: {error!r}") from error

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
            async with self._http.get(
                f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=_QUESTION_SECONDS)
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _post(self, data: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        try:
            return await self._http.post(self.url + _CHAT, data=data, headers={**self._key, **headers})
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            # An idle connection that the engine closed at this moment: nothing was answered.
            return await self._http.post(self.url + _CHAT, data=data, headers={**self._key, **headers})

    async def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            async with self._http.request(
                "GET" if body is None else "POST",
                self.url + path,
                data=None if body is None else orjson.dumps(body),
                headers={**self._key, **PROBE_HEADERS},
                timeout=aiohttp.ClientTimeout(total=_QUESTION_SECONDS),
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
