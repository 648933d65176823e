"""What an upstream is: an engine whose ids can be trained, or any server that speaks chat completions."""

import logging
from dataclasses import dataclass

from polar.errors import EngineError
from polar.gateway.adapters import EngineKind, VllmAdapter
from polar.gateway.engine import EngineClient, EngineDownError, EngineHttp
from polar.gateway.probe import EngineUnfitError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server that answers, and how to talk to it."""

    url: str
    """Without /v1."""
    model: str
    kind: EngineKind
    why_untrainable: str
    """Empty where it proves its ids."""


async def look_at(url: str, model: str, api_key: str) -> Upstream:
    """Ask a server what it is. `model`: empty takes the only one that it offers. Raises EngineError."""
    base = url.rstrip("/").removesuffix("/v1")
    async with EngineHttp() as http:
        client = EngineClient("upstream", base, http, api_key=api_key)
        if not model:
            model = _only_model(base, await client.models())
        try:
            await VllmAdapter(client, model, renderer=None).probe()
        except EngineUnfitError as error:
            if isinstance(error.__cause__, EngineDownError):
                raise
            return Upstream(base, model, "openai", str(error))
    return Upstream(base, model, "vllm", "")


def _only_model(base: str, offered: dict[str, int | None]) -> str:
    if len(offered) == 1:
        return next(iter(offered))
    some = ", ".join(sorted(offered)[:5]) or "none"
    raise EngineError(f"{base} offers {len(offered)} models ({some}, …): name one with --model")
