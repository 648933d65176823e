"""How old a policy version is, over the tree of lineages.

Each start of the trainer claims a lineage whose first version names the checkpoint it came
from as its parent, with equal weights and the equal step. Staleness is counted in steps from
the last common ancestor: a version of a lineage that was given up is as old as the checkpoint
that the living lineage shares with it.
"""

from collections.abc import Iterable

from schemas.policies import PolicyPublished, PolicyVersion


class PolicyLineages:
    """The published versions of one policy, in order of the log."""

    def __init__(self, published: Iterable[PolicyPublished] = ()) -> None:
        self._parent: dict[PolicyVersion, PolicyVersion | None] = {}
        self._newest: PolicyVersion | None = None
        for event in published:
            self.add(event)

    def add(self, event: PolicyPublished) -> None:
        """Take a published version; a repeated one changes nothing."""
        if event.version not in self._parent:
            self._parent[event.version] = event.parent
            self._newest = event.version

    @property
    def newest(self) -> PolicyVersion | None:
        """The version that was published last."""
        return self._newest

    def __len__(self) -> int:
        """Number of known versions."""
        return len(self._parent)

    def staleness(self, version: PolicyVersion) -> int:
        """Versions between the newest one and its last common ancestor with `version`.

        0 before anything was published, and for versions that are newer than the newest known
        one. A version of an unknown lineage counts by its step alone.
        """
        if self._newest is None:
            return 0
        line = self._ancestry(self._newest)
        for ancestor in self._ancestry(version):
            if ancestor in line:
                return self._newest.step - ancestor.step
        return max(0, self._newest.step - version.step)

    def _ancestry(self, version: PolicyVersion) -> dict[PolicyVersion, None]:
        """The version and its ancestors, the newest first."""
        line: dict[PolicyVersion, None] = {}
        at: PolicyVersion | None = version
        while at is not None and at not in line:
            line[at] = None
            at = self._parent.get(at)
        return line
