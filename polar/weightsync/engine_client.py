"""One vLLM engine's control routes, each with a time-out of its own.

Invariant: every answer other than 200 is an EngineError that names the engine and the route;
no route is retried here.
"""

from typing import Any

import httpx

from polar.errors import EngineError

CANARY_HEADERS = {"X-Polar-Purpose": "canary"}
"""A relay or an audit tells these requests from those of harnesses."""
_QUICK_SECONDS = 10.0


class EngineDownError(EngineError):
    """Nothing answers at the engine's URL."""


class EngineClient:
    """Control of one engine."""

    def __init__(
        self,
        engine_id: str,
        url: str,
        *,
        timeout_seconds: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`timeout_seconds` bounds pausing, loading and the canary; everything else has 10 s."""
        self.engine_id = engine_id
        self.url = url.rstrip("/")
        self._timeout = timeout_seconds
        # vLLM resets a connection after an error of its workers: each request gets a new one.
        self._http = httpx.AsyncClient(
            base_url=self.url,
            limits=httpx.Limits(max_keepalive_connections=0),
            transport=transport,
            trust_env=False,
        )
        self._model: str | None = None

    async def close(self) -> None:
        """Close connections."""
        await self._http.aclose()

    async def weight_version(self) -> str:
        """What finish() or relabel() set last; `default` in an engine that runs its own folder."""
        return str((await self._call("GET", "/weight_info"))["weight_version"])

    async def is_paused(self) -> bool:
        """Whether generation stands still."""
        return bool((await self._call("GET", "/is_paused"))["is_paused"])

    async def pause(self) -> None:
        """Freeze requests in flight and drop cached prefixes; pausing twice is harmless."""
        await self._call("POST", "/pause?mode=keep&clear_cache=true", seconds=self._timeout)

    async def resume(self) -> None:
        """Go on; running requests are prefilled again under the present weights."""
        await self._call("POST", "/resume", seconds=self._timeout)

    async def load(self, path: str, sha256: str, version: str) -> None:
        """Load the folder's weights and name them; the engine must be paused.

        The engine compares the digest first: an EngineError then leaves the old weights in place.
        """
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": {}}, seconds=self._timeout)
        try:
            await self._call("POST", "/start_weight_update", seconds=self._timeout)
        except EngineDownError:
            raise
        except EngineError:
            # An update that another weight-sync began and did not end. Ending it changes nothing.
            await self._call("POST", "/finish_weight_update", {}, seconds=self._timeout)
            await self._call("POST", "/start_weight_update", seconds=self._timeout)
        update = {"update_info": {"path": path, "sha256": sha256}}
        await self._call("POST", "/update_weights", update, seconds=self._timeout)
        await self._call("POST", "/finish_weight_update", {"weight_version": version}, seconds=self._timeout)

    async def relabel(self, version: str) -> None:
        """Give the loaded weights another version."""
        await self._call("POST", "/update_weight_version", {"new_version": version})

    async def checksums(self) -> dict[str, str]:
        """The engine's own checksum of each loaded parameter.

        On a CPU it sees embeddings and norms only: kernels hold packed copies of everything else.
        """
        answer = await self._call("POST", "/weight_checker", {"action": "checksum"}, seconds=self._timeout)
        return dict(answer["checksums"])

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """[n-1] log-probs at temperature 1 of token_ids[1:], each under all tokens before it."""
        body = {
            "model": await self._served_model(),
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        answer = await self._call(
            "POST", "/v1/completions", body, seconds=self._timeout, headers=CANARY_HEADERS
        )
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            return [
                float(entry[str(token)]["logprob"])
                for token, entry in zip(token_ids[1:], entries[1:], strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"engine {self.engine_id} gives no prompt log-probs: {error!r}") from error

    async def _served_model(self) -> str:
        if self._model is None:
            models = (await self._call("GET", "/v1/models"))["data"]
            if not models:
                raise EngineError(f"engine {self.engine_id} serves no model")
            self._model = str(models[0]["id"])
        return self._model

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        seconds: float = _QUICK_SECONDS,
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        route = path.partition("?")[0]
        try:
            answer = await self._http.request(method, path, json=body, timeout=seconds, headers=headers)
        except httpx.ConnectError as error:
            raise EngineDownError(f"engine {self.engine_id} does not answer at {self.url}") from error
        except httpx.HTTPError as error:
            raise EngineError(f"engine {self.engine_id} {route}: {error!r}") from error
        if answer.status_code == httpx.codes.BAD_GATEWAY:
            raise EngineDownError(f"engine {self.engine_id} is down behind {self.url}")
        if answer.status_code != httpx.codes.OK:
            raise EngineError(
                f"engine {self.engine_id} {route} answers {answer.status_code}: {answer.text[:500]}"
            )
        try:
            value = answer.json()
        except ValueError as error:
            raise EngineError(f"engine {self.engine_id} {route} answers no JSON") from error
        if not isinstance(value, dict):
            raise EngineError(f"engine {self.engine_id} {route} answers no JSON object")
        return value
