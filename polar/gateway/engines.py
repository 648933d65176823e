"""The engines of a gateway: which may be used, with which versions, for which session.

Each engine has one watcher: probe until it is fit, then look at its health; an outage, also
one that a call ran into, leads back to the probe.

| a call waits for | who unblocks it | bound |
|---|---|---|
| an engine that runs with the current weights | weight-sync: one has them | `engine_wait_seconds`, then any |

Invariants: no call goes to an engine that has not passed the probe since it was last seen down,
or that is draining. No call goes to an engine that is behind while another one is not. A weight
update, with all engines paused, refuses nothing.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from polar.core.engine_choice import choose_engine
from polar.errors import EngineError
from polar.gateway.adapters import EngineAdapter
from polar.gateway.probe import UNVERIFIED, EngineUnfitError
from polar.gateway.versions import CurrentPolicy, EngineVersions, Phase
from schemas.policies import PolicyVersion

logger = logging.getLogger(__name__)

_NEWCOMER_SECONDS = 60.0
"""A gateway that weight-sync has not spoken to yet asks the engine itself so long after its start."""

CAPTURE_ALARM_AFTER = 20
"""So many answers in a row without ids are no accident."""


class NoEngineError(EngineError):
    """No engine can take a call; `reason` is a word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class EngineSlot:
    """One engine and what is known of it."""

    client: EngineAdapter
    versions: EngineVersions = field(default_factory=EngineVersions)
    reason: str = "engine_down"
    """Why it is not used, in a word; empty when it is fit."""
    detail: str = "the engine has not been probed yet"
    context_tokens: int | None = None
    """Longest prompt and answer together, as the engine tells."""
    rendering: str = "not_probed"
    """Why it gets no prompts as ids, in a word; empty when it does."""
    logprobs_mode: str = UNVERIFIED
    """Which log-probs it gives, as the probe saw."""
    in_flight: int = 0
    is_draining: bool = False
    """Calls in flight end, new ones go elsewhere."""
    look: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to make the watcher look at once."""
    capture_alarms: int = 0
    """Times that it stopped to prove what it samples."""
    _num_without_ids: int = 0

    @property
    def engine_id(self) -> str:
        """Its name in settings and records."""
        return self.client.engine_id

    def suspect(self, reason: str, detail: str) -> None:
        """A call saw it fail: no more calls until it passes the probe again."""
        self.reason, self.detail = reason, detail
        self.look.set()

    def note_capture(self, *, is_complete: bool) -> None:
        """An answer came with all its ids and log-probs, or without. Many without in a row are an
        engine that stopped to give them: it must prove itself anew, or no call would be trained."""
        if is_complete or not self.client.gives_ids:
            self._num_without_ids = 0
            return
        self._num_without_ids += 1
        if self._num_without_ids >= CAPTURE_ALARM_AFTER:
            self._num_without_ids = 0
            self.capture_alarms += 1
            detail = f"engine {self.engine_id} gave {CAPTURE_ALARM_AFTER} answers in a row without ids"
            logger.error("engine_id=%s: capture_rate_zero: %s", self.engine_id, detail)
            self.suspect("engine_incomplete_ids", detail)


class EnginePool:
    """All engines of a gateway."""

    def __init__(
        self, adapters: Sequence[EngineAdapter], *, probe_seconds: float, wait_seconds: float
    ) -> None:
        """`wait_seconds`: how long a call waits for an engine with the current weights."""
        self.slots = {adapter.engine_id: EngineSlot(adapter) for adapter in adapters}
        self.current = CurrentPolicy()
        self.num_waiting = 0
        """Calls that wait for an engine."""
        self._probe_seconds = probe_seconds
        self._wait_seconds = wait_seconds
        self._started = time.monotonic()
        self._changed = asyncio.Event()

    @property
    def trouble(self) -> tuple[str, str] | None:
        """(reason, detail) when no engine can be used."""
        usable = [slot for slot in self.slots.values() if not slot.reason]
        if not usable:
            first = next(iter(self.slots.values()))
            return first.reason, first.detail
        if all(slot.is_draining for slot in usable):
            return "engines_draining", "every engine that is fit is draining"
        return None

    def is_behind(self, slot: EngineSlot) -> bool:
        """Whether its weights are not the current ones, or are being changed just now."""
        return slot.versions.pending is not None or slot.versions.settled != self.current.version

    async def acquire(self, session_id: str, stays_with: str | None = None) -> EngineSlot:
        """The engine for a call, by load and by the session's last engine.

        Raises NoEngineError when none is fit.
        """
        if current := self._current():
            return self._pick(current, session_id, stays_with)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_seconds):
                while not current:
                    self.num_waiting += 1
                    try:
                        await self._changed.wait()
                    finally:
                        self.num_waiting -= 1
                    current = self._current()
                return self._pick(current, session_id, stays_with)
        slot = self._pick(self._usable(), session_id, stays_with)
        logger.warning(
            "session_id=%s goes to engine_id=%s with policy_version=%s, although %s is current: "
            "no other engine came in %s s",
            session_id, slot.engine_id, slot.versions.settled, self.current.version, self._wait_seconds,
        )  # fmt: skip
        return slot

    def any_fit(self) -> EngineSlot:
        """For questions that no weights matter to. Raises NoEngineError."""
        return min(self._usable(), key=lambda slot: slot.in_flight)

    def tell(self, engine_id: str, phase: Phase, version: PolicyVersion) -> bool:
        """weight-sync announces a version; False when there is no such engine here."""
        slot = self.slots.get(engine_id)
        if slot is None:
            return False
        slot.versions.tell(phase, version)
        if phase == "settled":
            self.current.settled(version)
        self._wake()
        logger.info("engine_id=%s policy_version=%s is %s", engine_id, version, phase)
        return True

    def drain(self, engine_id: str, *, is_draining: bool) -> EngineSlot | None:
        """Send new calls elsewhere, or no longer; None when there is no such engine here."""
        slot = self.slots.get(engine_id)
        if slot is not None:
            slot.is_draining = is_draining
            self._wake()
            logger.info(
                "engine_id=%s %s, %s calls in flight",
                engine_id, "drains" if is_draining else "takes calls again", slot.in_flight,
            )  # fmt: skip
        return slot

    async def refresh(self, slot: EngineSlot) -> None:
        """Before a call's interval is closed: while weight-sync may not know this gateway yet,
        ask the engine whether its weights changed meanwhile."""
        told = slot.versions.times_told
        if told or time.monotonic() - self._started > _NEWCOMER_SECONDS:
            return
        try:
            seen = await slot.client.weight_version()
        except (EngineError, ValueError) as error:
            slot.suspect("engine_down", f"engine {slot.engine_id} does not name its weights: {error}")
            return
        self._observe(slot, seen, told)

    async def run(self) -> None:
        """Watch all engines for ever."""
        async with asyncio.TaskGroup() as group:
            for slot in self.slots.values():
                group.create_task(self._watch(slot))

    def _current(self) -> list[EngineSlot]:
        """Those with the current weights. Raises NoEngineError when none may take calls, behind or not."""
        return [slot for slot in self._usable() if not self.is_behind(slot)]

    def _usable(self) -> list[EngineSlot]:
        """Whatever may take calls, behind or not. Raises NoEngineError when nothing may."""
        usable = [slot for slot in self.slots.values() if not slot.reason and not slot.is_draining]
        if not usable:
            reason, detail = self.trouble or ("engine_down", "no engine is fit")
            raise NoEngineError(reason, f"{reason}: {detail}")
        return usable

    def _pick(self, slots: Sequence[EngineSlot], session_id: str, stays_with: str | None) -> EngineSlot:
        loads = {slot.engine_id: slot.in_flight for slot in slots}
        return self.slots[choose_engine(session_id, loads, stays_with)]

    def _observe(self, slot: EngineSlot, version: PolicyVersion, times_told: int) -> None:
        slot.versions.observe(version, times_told)
        self.current.observed(slot.versions.settled)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

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
            facts = await slot.client.probe()
        except EngineUnfitError as error:
            if error.reason != slot.reason:
                logger.warning("engine_id=%s is not used (%s): %s", slot.engine_id, error.reason, error)
            slot.reason, slot.detail = error.reason, str(error)
            self._wake()
            return
        slot.reason = slot.detail = ""
        slot.context_tokens, slot.logprobs_mode = facts.context_tokens, facts.logprobs_mode
        if facts.rendering != slot.rendering:
            logger.info("engine_id=%s renders %s", slot.engine_id, facts.rendering or "as the gateway does")
        slot.rendering = facts.rendering
        self._observe(slot, facts.version, told)
        logger.info("engine_id=%s is fit, policy_version=%s", slot.engine_id, facts.version)
