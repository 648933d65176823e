"""The engines of a gateway: which may be used, with which versions, for which session.

Each engine has one watcher: probe until it is fit, then look at its health; an outage, also
one that a call ran into, leads back to the probe. Invariant: no call goes to an engine that
has not passed the probe since it was last seen down.
"""

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass, field

import aiohttp

from polar.errors import EngineError
from polar.gateway.engine import EngineClient
from polar.gateway.probe import EngineUnfitError, probe
from polar.gateway.versions import EngineVersions, Phase, parse_weight_version
from schemas.policies import PolicyVersion

logger = logging.getLogger(__name__)

_NEWCOMER_SECONDS = 60.0
"""A gateway that weight-sync has not spoken to yet asks the engine itself so long after its start."""


@dataclass(slots=True)
class EngineSlot:
    """One engine and what is known of it."""

    client: EngineClient
    versions: EngineVersions = field(default_factory=EngineVersions)
    reason: str = "engine_down"
    """Why it is not used, in a word; empty when it is fit."""
    detail: str = "the engine has not been probed yet"
    in_flight: int = 0
    look: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to make the watcher look at once."""

    @property
    def engine_id(self) -> str:
        """Its name in settings and records."""
        return self.client.engine_id

    def suspect(self, reason: str, detail: str) -> None:
        """A call saw it fail: no more calls until it passes the probe again."""
        self.reason, self.detail = reason, detail
        self.look.set()


class EnginePool:
    """All engines of a gateway."""

    def __init__(
        self, urls: dict[str, str], http: aiohttp.ClientSession, *, model: str, probe_seconds: float
    ) -> None:
        self.slots = {name: EngineSlot(EngineClient(name, url, http)) for name, url in urls.items()}
        self._model = model
        self._probe_seconds = probe_seconds
        self._started = time.monotonic()

    @property
    def trouble(self) -> tuple[str, str] | None:
        """(reason, detail) when no engine can be used."""
        unfit = [slot for slot in self.slots.values() if slot.reason]
        if len(unfit) < len(self.slots):
            return None
        return unfit[0].reason, unfit[0].detail

    def choose(self, session_id: str) -> EngineSlot | None:
        """The fit engine that this session stays with while the set of fit engines does."""
        fit = [slot for slot in self.slots.values() if not slot.reason]
        if len(fit) < 2:
            return fit[0] if fit else None
        return max(fit, key=lambda slot: hashlib.sha256(f"{slot.engine_id} {session_id}".encode()).digest())

    def tell(self, engine_id: str, phase: Phase, version: PolicyVersion) -> bool:
        """weight-sync announces a version; False when there is no such engine here."""
        slot = self.slots.get(engine_id)
        if slot is None:
            return False
        slot.versions.tell(phase, version)
        logger.info("engine_id=%s policy_version=%s is %s", engine_id, version, phase)
        return True

    async def refresh(self, slot: EngineSlot) -> None:
        """Before a call's interval is closed: while weight-sync may not know this gateway yet,
        ask the engine whether its weights changed meanwhile."""
        told = slot.versions.times_told
        if told or time.monotonic() - self._started > _NEWCOMER_SECONDS:
            return
        try:
            seen = parse_weight_version(await slot.client.weight_version())
        except (EngineError, ValueError) as error:
            slot.suspect("engine_down", f"engine {slot.engine_id} does not name its weights: {error}")
            return
        slot.versions.observe(seen, told)

    async def run(self) -> None:
        """Watch all engines for ever."""
        async with asyncio.TaskGroup() as group:
            for slot in self.slots.values():
                group.create_task(self._watch(slot))

    async def _watch(self, slot: EngineSlot) -> None:
        failures = 0
        while True:
            slot.look.clear()
            if slot.reason:
                await self._probe(slot)
                failures = 0
            elif await slot.client.is_healthy():
                failures = 0
            else:
                failures += 1
                if failures == 2:
                    slot.suspect("engine_down", f"engine {slot.engine_id} fails its health check")
                    continue
            try:
                await asyncio.wait_for(slot.look.wait(), self._probe_seconds)
            except TimeoutError:
                continue

    async def _probe(self, slot: EngineSlot) -> None:
        told = slot.versions.times_told
        try:
            version = await probe(slot.client, self._model)
        except EngineUnfitError as error:
            if error.reason != slot.reason:
                logger.warning("engine_id=%s is not used (%s): %s", slot.engine_id, error.reason, error)
            slot.reason, slot.detail = error.reason, str(error)
            return
        slot.versions.observe(version, told)
        slot.reason = slot.detail = ""
        logger.info("engine_id=%s is fit, policy_version=%s", slot.engine_id, version)
