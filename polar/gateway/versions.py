"""Which weights an engine may be sampling with, as weight-sync tells it, and which are current.

Invariant: a call's interval is never too narrow. weight-sync tells `pending` after the engine
paused and `settled` before it resumes, and waits for both answers, so every version that the
engine sampled with between a call's dispatch and its last token was told in that time or was
settled at dispatch.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from schemas.policies import BASE_VERSION, PolicyVersion

Phase = Literal["pending", "settled"]

_PAST_LINEAGES = 64


def parse_weight_version(text: str) -> PolicyVersion:
    """The version that an engine reports. Raises ValueError when it is none of ours."""
    return BASE_VERSION if text == "default" else PolicyVersion.parse(text)


@dataclass(slots=True)
class VersionMark:
    """A call's view of its engine's versions, taken at dispatch; give it back to `close`."""

    first: PolicyVersion
    told: list[PolicyVersion]
    """Versions told since, in order; begins with the one pending at dispatch, if any."""


@dataclass(slots=True)
class EngineVersions:
    """The versions of one engine."""

    settled: PolicyVersion = BASE_VERSION
    pending: PolicyVersion | None = None
    times_told: int = 0
    """Above 0 weight-sync knows this gateway: every change is told before it happens."""
    _open: dict[int, VersionMark] = field(default_factory=dict)

    def tell(self, phase: Phase, version: PolicyVersion) -> None:
        """weight-sync announces a version."""
        self.times_told += 1
        if phase == "pending":
            self.pending = version
        else:
            self.settled, self.pending = version, None
        self._note(version)

    def observe(self, version: PolicyVersion, times_told: int) -> None:
        """The engine named this version when asked; `times_told` was read before asking.

        What weight-sync told since, or tells of a load under way, is the newer word.
        """
        if times_told == self.times_told and self.pending is None and version != self.settled:
            self.settled = version
            self._note(version)

    def open(self) -> VersionMark:
        """A call is dispatched now."""
        mark = VersionMark(self.settled, [] if self.pending is None else [self.pending])
        self._open[id(mark)] = mark
        return mark

    def close(self, mark: VersionMark) -> PolicyVersion:
        """The call's last token is here: the newest version that may have made it.

        After a load that was rolled back this is the version that was tried, not the one
        that came back.
        """
        self._open.pop(id(mark), None)
        return next((version for version in reversed(mark.told) if version != mark.first), mark.first)

    def _note(self, version: PolicyVersion) -> None:
        for mark in self._open.values():
            # Bounded: repeats of the latest word add nothing.
            if not mark.told or mark.told[-1] != version:
                mark.told.append(version)


@dataclass(slots=True)
class CurrentPolicy:
    """The newest version that any engine was seen to run: engines behind it get no new calls."""

    version: PolicyVersion = BASE_VERSION
    _past: deque[str] = field(default_factory=lambda: deque(maxlen=_PAST_LINEAGES))
    """Lineages that another one followed: an engine that is late does not bring them back."""

    def settled(self, version: PolicyVersion) -> None:
        """weight-sync told that an engine runs this version."""
        if version.lineage == self.version.lineage:
            self._raise_to(version)
        elif version.lineage not in self._past and version != BASE_VERSION:
            self._past.append(self.version.lineage)
            self.version = version

    def observed(self, version: PolicyVersion) -> None:
        """An engine named this version when asked. Which of two lineages is newer it cannot tell."""
        if self.version == BASE_VERSION or version.lineage == self.version.lineage:
            self.settled(version)

    def _raise_to(self, version: PolicyVersion) -> None:
        if version.step > self.version.step:
            self.version = version
