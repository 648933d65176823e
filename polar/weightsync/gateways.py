"""The gateways that must know an engine's version before it samples with it.

Invariant: `tell` returns only when every gateway that is alive has answered. Alive is one that
answers, or whose heartbeat came within the last seconds.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

import httpx

from polar.errors import GatewayError
from polar.weightsync.phase import Phase
from schemas.nodes import GatewayHeartbeat
from schemas.policies import PolicyVersion

logger = logging.getLogger(__name__)

_ALIVE_SECONDS = 10.0
"""A gateway beats once a second; one that was silent for so long and does not answer is gone."""
_FORGET_SECONDS = 600.0
_REQUEST_SECONDS = 5.0
_RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why a gateway does not know yet."""

    what: str
    answers: bool


class Gateways:
    """Who they are, and how to tell them."""

    def __init__(
        self,
        configured: str,
        admin_token: str,
        *,
        timeout_seconds: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`configured`: comma-separated URLs of gateways besides those that send heartbeats."""
        self._configured = [url.strip().rstrip("/") for url in configured.split(",") if url.strip()]
        self._heard: dict[str, float] = {}
        self._timeout = timeout_seconds
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {admin_token}"},
            timeout=_REQUEST_SECONDS,
            transport=transport,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close connections."""
        await self._http.aclose()

    def hear(self, heartbeat: GatewayHeartbeat) -> None:
        """A heartbeat was read from the log just now."""
        now = time.monotonic()
        self._heard[heartbeat.url.rstrip("/")] = now
        for url in [url for url, heard in self._heard.items() if now - heard > _FORGET_SECONDS]:
            del self._heard[url]

    async def tell(self, engine_id: str, phase: Phase, version: PolicyVersion) -> None:
        """Announce a version to all gateways.

        Raises GatewayError when one that is alive has not taken it within the time-out.
        """
        deadline = time.monotonic() + self._timeout
        answered: set[str] = set()
        while True:
            missing = [url for url in self._urls() if url not in answered]
            troubles = await asyncio.gather(
                *(self._tell_one(url, engine_id, phase, version) for url in missing)
            )
            alive = []
            for url, trouble in zip(missing, troubles, strict=True):
                if trouble is None:
                    answered.add(url)
                elif trouble.answers or self._beats(url):
                    alive.append(f"{url}: {trouble.what}")
                else:
                    logger.warning(
                        "gateway %s is skipped, it neither answers nor sends heartbeats: %s",
                        url,
                        trouble.what,
                    )
            if not alive:
                return
            if time.monotonic() > deadline:
                raise GatewayError(
                    f"no answer to {phase} {version} of engine {engine_id} from {'; '.join(alive)}"
                )
            await asyncio.sleep(_RETRY_SECONDS)

    def _urls(self) -> list[str]:
        return sorted({*self._configured, *self._heard})

    def _beats(self, url: str) -> bool:
        heard = self._heard.get(url)
        return heard is not None and time.monotonic() - heard < _ALIVE_SECONDS

    async def _tell_one(
        self, url: str, engine_id: str, phase: Phase, version: PolicyVersion
    ) -> _Trouble | None:
        """None when the gateway knows."""
        body = {"engine_id": engine_id, "phase": phase, "version": version.model_dump(mode="json")}
        try:
            answer = await self._http.post(f"{url}/admin/engines/policy", json=body)
        except httpx.HTTPError as error:
            return _Trouble(repr(error), answers=False)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            return _Trouble("it refuses our token; both need the same POLAR_SECRET_FILE", answers=True)
        # A gateway that does not use this engine has nothing to know.
        if answer.status_code in {httpx.codes.OK, httpx.codes.NOT_FOUND}:
            return None
        return _Trouble(f"it answers {answer.status_code}", answers=True)
