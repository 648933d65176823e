"""The node's side of a gateway's admin API: open and seal sessions.

Every call has an overall time-out, inside which refusals that may pass (no connection, 429,
5xx) are tried again; both requests are idempotent.
"""

import asyncio
import logging
from typing import Any, Self

import httpx

from polar.core.session_keys import admin_token
from polar.errors import GatewayError
from schemas.nodes import StartSession
from schemas.sessions import Outcome

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0
_REQUEST_SECONDS = 45.0
"""One request: a seal may wait for calls in flight, an opening for the broker."""


class GatewayClient:
    """Async context manager over one HTTP connection pool."""

    def __init__(self, secret: bytes) -> None:
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {admin_token(secret)}"},
            timeout=_REQUEST_SECONDS,
            limits=httpx.Limits(max_connections=None),
            # A proxy of the machine has no business between node and gateway.
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def open_session(self, start: StartSession, expires_at: float, timeout_seconds: float) -> None:
        """SessionOpened is on the log afterwards. `expires_at`: unix seconds. Raises GatewayError."""
        body = {
            "session_id": start.session_id,
            "group_id": start.group_id,
            "sampling": start.task.sampling.model_dump(mode="json"),
            "trainable": True,
            "expires_at": expires_at,
        }
        await self._post(start, "open", body, timeout_seconds)

    async def seal_session(
        self, start: StartSession, outcome: Outcome, reason: str, timeout_seconds: float
    ) -> int:
        """Number of calls; the seal is on the log or on the gateway's disk. Raises GatewayError."""
        body = {"session_id": start.session_id, "outcome": outcome.value, "reason": reason}
        answer = await self._post(start, "seal", body, timeout_seconds)
        calls = answer.get("calls") if isinstance(answer, dict) else None
        if not isinstance(calls, int):
            raise GatewayError(
                f"gateway {start.gateway_id}: the seal's answer names no calls: {answer!r:.200}"
            )
        return calls

    async def _post(
        self, start: StartSession, verb: str, body: dict[str, Any], timeout_seconds: float
    ) -> Any:
        url = f"{start.gateway_url.rstrip('/')}/admin/sessions/{verb}"
        last = "no answer"
        pause = _FIRST_PAUSE_SECONDS
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    try:
                        answer = await self._http.post(url, json=body)
                    except httpx.HTTPError as error:
                        last = f"{type(error).__name__} {error}".strip()
                    else:
                        if answer.is_success:
                            return answer.json()
                        last = f"HTTP {answer.status_code}: {answer.text[:300]}"
                        if answer.status_code < 500 and answer.status_code != 429:
                            raise GatewayError(f"gateway {start.gateway_id} refused to {verb}: {last}")
                    logger.debug("session %s: %s is tried again (%s)", start.session_id, verb, last)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        except TimeoutError as error:
            raise GatewayError(
                f"gateway {start.gateway_id} at {start.gateway_url} did not {verb} the session within "
                f"{timeout_seconds:g} s: {last}"
            ) from error
        except ValueError as error:
            raise GatewayError(f"gateway {start.gateway_id}: the answer to {verb} is no JSON") from error
