"""Brings one engine to a published version, and finishes what a killed weight-sync began.

    running version   loaded digest   → done
    the target's      any             [settled → resume, if paused] → canary
    another           the target's    pending → relabel → settled → canary
    another           another         pause → pending → load → settled → resume → canary

Invariants: no token is sampled under weights that the gateways were not told of before. An engine
is left paused only while its weights are in doubt or a gateway that is alive has not heard.
The engine's own version is the only state; whoever is restarted asks for it.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from polar.errors import EngineError, GatewayError
from polar.weightsync.engine_client import EngineClient, EngineDownError
from polar.weightsync.gateways import Gateways
from schemas.base import canonical_json, digest
from schemas.engines import EngineState
from schemas.policies import BASE_VERSION, Canary, PolicyPublished, PolicyVersion

logger = logging.getLogger(__name__)

Publish = Callable[[EngineState], Awaitable[None]]


class CanaryError(EngineError):
    """The engine's log-probs are not the trainer's: its weights are in doubt."""


class EngineSync:
    """What is known of one engine."""

    def __init__(
        self,
        engine: EngineClient,
        gateways: Gateways,
        publish: Publish,
        *,
        policy: str,
        digests: Mapping[str, str],
    ) -> None:
        """`digests`: version → weights_sha256 of everything published so far."""
        self.engine = engine
        self._gateways = gateways
        self._publish = publish
        self._policy = policy
        self._digests = digests
        self._ready: str | None = None
        """Version that was last found to be in order."""
        self._in_doubt = False
        """The loaded weights are not what their version says; only a whole load helps."""
        self._running: PolicyVersion | None = None
        self._checksum = ""
        """Of the weights that `_running` names; empty while unknown."""
        self._last_state: EngineState | None = None

    async def bring_to(self, target: PolicyPublished) -> None:
        """Do what is left to do; nothing when the engine is as it should be.

        Raises EngineError or GatewayError when it could not be done now; call again.
        """
        wanted = str(target.version)
        running = await self.engine.weight_version()
        self._running = _parsed(running)
        if running != self._ready:
            # First contact, or it was restarted: nothing known of it holds.
            self._ready, self._checksum = None, ""
        if running == wanted and not self._in_doubt:
            if self._ready == wanted:
                return
            await self._finish_interrupted(target.version)
            await self._report_ready(target)
        elif await self._has_weights_of(target, running):
            await self._relabel(target)
        else:
            await self._load(target, self._running)

    async def _has_weights_of(self, target: PolicyPublished, running: str) -> bool:
        # Paused: perhaps an update broke off behind the load and before the new name.
        return (
            not self._in_doubt
            and self._digests.get(running) == target.weights_sha256
            and not await self.engine.is_paused()
        )

    async def report_failure(self, reason: str) -> None:
        """Publish that the engine is not in order, once per reason."""
        await self._report(
            EngineState(
                engine_id=self.engine.engine_id,
                url=self.engine.url,
                policy=self._policy,
                version=self._running,
                status="failed",
                reason=reason,
            )
        )

    async def _finish_interrupted(self, version: PolicyVersion) -> None:
        if await self.engine.is_paused():
            logger.warning(
                "engine_id=%s was left paused with policy_version=%s; going on there",
                self.engine.engine_id, version,
            )  # fmt: skip
            await self._gateways.tell(self.engine.engine_id, "settled", version)
            await self.engine.resume()

    async def _relabel(self, target: PolicyPublished) -> None:
        engine_id = self.engine.engine_id
        await self._gateways.tell(engine_id, "pending", target.version)
        await self.engine.relabel(str(target.version))
        await self._gateways.tell(engine_id, "settled", target.version)
        logger.info("engine_id=%s policy_version=%s: same weights, new name", engine_id, target.version)
        await self._report_ready(target)

    async def _load(self, target: PolicyPublished, running: PolicyVersion) -> None:
        engine_id = self.engine.engine_id
        if not self._checksum:
            self._checksum = await self._present_checksum()
        paused_at = time.monotonic()
        try:
            await self.engine.pause()
            await self._gateways.tell(engine_id, "pending", target.version)
            load_at = time.monotonic()
            await self.engine.load(target.weights_path, target.weights_sha256, str(target.version))
            load_seconds = time.monotonic() - load_at
        except EngineDownError:
            raise
        except (EngineError, GatewayError):
            await self._go_on_with(running)
            raise
        self._in_doubt, self._running = False, target.version
        await self._tell_settled(target.version)
        await self.engine.resume()
        paused_seconds = time.monotonic() - paused_at
        self._checksum = await self._present_checksum()
        logger.info(
            "engine_id=%s policy_version=%s loaded in %.2f s, paused %.2f s",
            engine_id, target.version, load_seconds, paused_seconds,
        )  # fmt: skip
        await self._report_ready(target, load_seconds=load_seconds, paused_seconds=paused_seconds)

    async def _go_on_with(self, running: PolicyVersion) -> None:
        """After a failed load: resume if, and only if, the old weights are still in place."""
        try:
            intact = not self._in_doubt and await self._present_checksum() == self._checksum
        except EngineDownError:
            return  # It comes back whole and running.
        except EngineError:
            intact = False
        if not intact:
            self._in_doubt = True
            logger.error(
                "engine_id=%s stays paused: its weights are neither the old nor the new ones",
                self.engine.engine_id,
            )
            return
        try:
            await self._gateways.tell(self.engine.engine_id, "settled", running)
        except GatewayError as error:
            # It believes that the new version may be running: wider than true, which is safe.
            logger.warning("%s", error)
        await self.engine.resume()

    async def _tell_settled(self, version: PolicyVersion) -> None:
        while True:
            try:
                await self._gateways.tell(self.engine.engine_id, "settled", version)
            except GatewayError as error:
                await self.report_failure(f"paused until all gateways know: {error}")
            else:
                return

    async def _report_ready(
        self, target: PolicyPublished, *, load_seconds: float = 0.0, paused_seconds: float = 0.0
    ) -> None:
        gap = None if target.canary is None else await self._checked_canary(target.canary, target.version)
        if not self._checksum:
            self._checksum = await self._present_checksum()
        await self._report(
            EngineState(
                engine_id=self.engine.engine_id,
                url=self.engine.url,
                policy=self._policy,
                version=target.version,
                status="ready",
                checksum=self._checksum,
                canary_gap=gap,
                load_seconds=load_seconds,
                paused_seconds=paused_seconds,
            )
        )
        self._running, self._ready = target.version, str(target.version)

    async def _checked_canary(self, canary: Canary, version: PolicyVersion) -> float:
        """Largest difference. Raises CanaryError, with the engine paused again, when it is too large."""
        prompt, completion = list(canary.prompt_ids), list(canary.completion_ids)
        found = (await self.engine.prompt_logprobs(prompt + completion))[len(prompt) - 1 :]
        gap = max((abs(a - b) for a, b in zip(found, canary.logprobs, strict=True)), default=0.0)
        if gap <= canary.tolerance:
            return gap
        # Also for NaN. Nothing more is sampled under weights that nobody can vouch for.
        self._in_doubt = True
        await self.engine.pause()
        try:
            # Calls go to other engines, or wait, until the weights are loaded again.
            await self._gateways.tell(self.engine.engine_id, "pending", version)
        except GatewayError as error:
            logger.warning("%s", error)
        raise CanaryError(
            f"engine {self.engine.engine_id}: log-probs on the canary differ by {gap:.3g}, allowed is "
            f"{canary.tolerance:.3g}; it is paused until its weights are in order"
        )

    async def _present_checksum(self) -> str:
        return digest(canonical_json(await self.engine.checksums()))

    async def _report(self, state: EngineState) -> None:
        if state != self._last_state:
            await self._publish(state)
            self._last_state = state


def _parsed(weight_version: str) -> PolicyVersion:
    """Whatever weight-sync did not name counts as the weights the engine was started with."""
    try:
        return PolicyVersion.parse(weight_version)
    except ValueError:
        return BASE_VERSION
