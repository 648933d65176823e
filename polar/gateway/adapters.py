"""Kinds of inference servers, and what a gateway needs of each.

| kind | speaks | proof of ids |
|---|---|---|
| vllm | chat completions with token ids, /weight_info, /health | asked for at every probe |
| openai | chat completions as hosted services take them | none: its calls are recorded and not trained |
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import orjson

from polar.core.rendering import Renderer
from polar.gateway.engine import EngineBrokenError, EngineClient, EngineDownError, EngineStatusError
from polar.gateway.probe import UNVERIFIED, EngineFacts, EngineUnfitError, probe
from polar.gateway.upstream import Response
from polar.gateway.versions import parse_weight_version
from schemas.policies import BASE_VERSION, PolicyVersion

EngineKind = Literal["vllm", "openai"]

_BEYOND_OPENAI = (
    "return_token_ids", "top_k", "min_p", "repetition_penalty",
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents",
    "mm_processor_kwargs", "skip_special_tokens", "stop_token_ids", "top_logprobs", "logprobs",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "kv_transfer_params",
)  # fmt: skip
"""Fields that hosted services answer with 400. Log-probs without ids prove nothing, and reasoning
models refuse them too."""


class EngineAdapter(Protocol):
    """One server of some kind."""

    gives_ids: bool
    """Whether an answer without ids is a fault of this server."""

    @property
    def engine_id(self) -> str:
        """Its name in settings and records."""

    @property
    def url(self) -> str:
        """Base URL without /v1."""

    async def probe(self) -> EngineFacts:
        """What it is, if records about it will be true. Raises EngineUnfitError."""

    async def weight_version(self) -> PolicyVersion:
        """The version that it runs. Raises EngineError, or ValueError for a name that is none of ours."""

    async def is_healthy(self) -> bool:
        """Whether it answers at all."""

    async def count_tokens(self, body: Mapping[str, Any]) -> int:
        """Tokens of the prompt that a request would make. Raises EngineError."""

    def chat(
        self, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Response]:
        """Send a chat request, as EngineClient.chat does."""


class VllmAdapter:
    """A vLLM server."""

    gives_ids = True

    def __init__(self, client: EngineClient, model: str, renderer: Renderer | None) -> None:
        """`model`: the served name that it must offer. `renderer`: whether it renders alike is asked."""
        self._client = client
        self._model = model
        self._renderer = renderer
        self.engine_id = client.engine_id
        self.url = client.url

    async def probe(self) -> EngineFacts:
        """See EngineAdapter."""
        return await probe(self._client, self._model, self._renderer)

    async def weight_version(self) -> PolicyVersion:
        """See EngineAdapter."""
        return parse_weight_version(await self._client.weight_version())

    async def is_healthy(self) -> bool:
        """See EngineAdapter."""
        return await self._client.is_healthy()

    async def count_tokens(self, body: Mapping[str, Any]) -> int:
        """See EngineAdapter."""
        return await self._client.count_tokens(body)

    def chat(
        self, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Response]:
        """See EngineAdapter."""
        return self._client.chat(body, headers)


class OpenAiAdapter:
    """Any server with OpenAI's chat completions; what it samples cannot be proved."""

    gives_ids = False

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.engine_id = client.engine_id
        self.url = client.url

    async def probe(self) -> EngineFacts:
        """See EngineAdapter: that it answers and takes the key is all that can be asked of it."""
        try:
            await self._client.models()
        except EngineStatusError as error:
            if error.status in (401, 403):
                raise EngineUnfitError(
                    "engine_key",
                    f"{error}; give a key that it takes in the file POLAR_GATEWAY_ENGINE_KEY_FILE",
                ) from error
        except (EngineDownError, EngineBrokenError) as error:
            raise EngineUnfitError("engine_down", str(error)) from error
        return EngineFacts(BASE_VERSION, None, rendering="engine_kind", logprobs_mode=UNVERIFIED)

    async def weight_version(self) -> PolicyVersion:
        """See EngineAdapter: its weights do not change under a name that we know."""
        return BASE_VERSION

    async def is_healthy(self) -> bool:
        """See EngineAdapter: it has no route for that; calls find out."""
        return True

    async def count_tokens(self, body: Mapping[str, Any]) -> int:
        """See EngineAdapter: no hosted service tells; four bytes of JSON a token is near enough."""
        return len(orjson.dumps(body)) // 4

    def chat(
        self, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Response]:
        """See EngineAdapter; without the fields that only vLLM knows."""
        plain = {name: value for name, value in body.items() if name not in _BEYOND_OPENAI}
        if isinstance(options := plain.get("stream_options"), dict):
            plain["stream_options"] = {"include_usage": bool(options.get("include_usage"))}
        return self._client.chat(plain, headers)


def new_adapter(
    kind: EngineKind, client: EngineClient, model: str, renderer: Renderer | None
) -> EngineAdapter:
    """The adapter of a kind over a client."""
    return VllmAdapter(client, model, renderer) if kind == "vllm" else OpenAiAdapter(client)
