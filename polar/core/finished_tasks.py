"""What group-events says about groups: which were opened, how they ended.

The topic is read from its beginning at every start, so a second submission of a task is
recognised, and the status of a finished task can be told, after any restart. Invariant: memory
is bounded by the open groups, `max_history` and `max_remembered`.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from schemas.group_events import GroupMembersFixed, GroupOpened, GroupSealed


@dataclass(slots=True)
class FinishedTask:
    """A group whose members are fixed."""

    policy: str
    fixed: GroupMembersFixed
    sealed: str | None = None
    """Reason of its GroupSealed, once the grouper has written it."""


class FinishedTasks:
    """Open groups in full, finished ones bounded, oldest forgotten first."""

    def __init__(self, max_history: int, max_remembered: int) -> None:
        self._max_history = max_history
        self._max_remembered = max_remembered
        self._opened: dict[str, tuple[float, str]] = {}
        """Group → (when it was opened, policy), while its members are not fixed."""
        self._fixed: OrderedDict[str, None] = OrderedDict()
        self._history: OrderedDict[str, FinishedTask] = OrderedDict()

    def on_opened(self, event: GroupOpened, opened_at: float) -> None:
        """GroupOpened was read; the first one counts."""
        if event.group_id not in self._fixed:
            self._opened.setdefault(event.group_id, (opened_at, event.policy))

    def on_fixed(self, event: GroupMembersFixed) -> bool:
        """GroupMembersFixed was read. True for the first one of the group."""
        if event.group_id in self._fixed:
            return False
        _, policy = self._opened.pop(event.group_id, (0.0, ""))
        self._fixed[event.group_id] = None
        self._history[event.group_id] = FinishedTask(policy, event)
        while len(self._history) > self._max_history:
            self._history.popitem(last=False)
        while len(self._fixed) > self._max_remembered:
            self._fixed.popitem(last=False)
        return True

    def on_sealed(self, event: GroupSealed) -> None:
        """GroupSealed was read; the first one counts."""
        finished = self._history.get(event.group_id)
        if finished is not None and finished.sealed is None:
            finished.sealed = event.reason

    def opened_at(self, group_id: str) -> float | None:
        """Unix seconds of its opening; None when it is not open, 0.0 once it is fixed."""
        if group_id in self._fixed:
            return 0.0
        opened = self._opened.get(group_id)
        return opened[0] if opened else None

    def is_fixed(self, group_id: str) -> bool:
        """Whether its members are fixed (as far back as ids are remembered)."""
        return group_id in self._fixed

    def get(self, group_id: str) -> FinishedTask | None:
        """How it ended, as far back as the history goes."""
        return self._history.get(group_id)

    def __iter__(self) -> Iterator[str]:
        """Ids in the history, newest first."""
        return reversed(self._history)

    def __len__(self) -> int:
        """Finished tasks in the history."""
        return len(self._history)
