"""Open tasks and their sessions: records in, decisions out.

Every handler only notes what the log says; `settle` then derives what must be written next.
A decision takes effect when it is read back from the log, never when it is written, so that a
scheduler that starts anew in the middle comes to the same state. `settle` may be called at
any time: it writes nothing twice before `retry_after`.

Invariants: a member has at most one unfinished session that is not superseded; a session is
started only after its SessionRequested was read back, and requested only after its group's
GroupOpened was; a task leaves the book when its members are fixed and all its sessions ended.
"""

import heapq
from collections.abc import Iterator

from polar.core.finished_tasks import FinishedTasks
from polar.core.lifecycle import LifecycleEvent, SessionState, apply
from polar.core.scheduling_state import Member, SchedulingLimits, Session, Task
from polar.core.stage import Emit
from schemas.base import Event, digest_of
from schemas.calls import SessionAbandoned
from schemas.group_events import GroupMembersFixed, GroupOpened
from schemas.ids import parse_session_id, session_id
from schemas.nodes import CancelSession, StartSession
from schemas.sessions import (
    SessionFinished,
    SessionLost,
    SessionReady,
    SessionRequested,
)
from schemas.tasks import RolloutTask, TaskCancelled

OPENED_AT = "opened-at"
"""Header of GroupOpened: unix seconds from which the group's deadline counts."""


class TaskBook:
    """All tasks that are not over. `epoch` is this scheduler's once it decides."""

    def __init__(self, limits: SchedulingLimits, finished: FinishedTasks) -> None:
        self._limits = limits
        self.finished = finished
        self.epoch = 0
        self.tasks: dict[str, Task] = {}
        self.live: dict[str, Session] = {}
        """Sessions that have not ended, by id."""
        self._sessions: dict[str, Session] = {}
        self._unclaimed: dict[str, list[Session]] = {}
        """Sessions read before their task, by task id; only while catching up."""
        self._is_catching_up = True
        self._opening: set[str] = set()
        """Tasks whose GroupOpened was written and not read back."""
        self._arrivals = 0
        self._queue: list[tuple[int, int, str]] = []
        """(order of the task, member, task id) of members that wait for a node."""

    # -- what the log says ----------------------------------------------------------------

    def add_task(self, event: RolloutTask) -> Task | None:
        """A task came; None when one of this id is open."""
        if event.task_id in self.tasks:
            return None
        self._arrivals += 1
        task = self.tasks[event.task_id] = Task(
            task_id=event.task_id,
            spec=event.spec,
            order=self._arrivals,
            runtime_digest=digest_of(event.spec.runtime),
            members=[Member(number) for number in range(event.spec.num_samples)],
            opened_at=self.finished.opened_at(event.task_id),
            is_fixed=self.finished.is_fixed(event.task_id),
        )
        for session in self._unclaimed.pop(event.task_id, []):
            self._claim(task, session)
        return task

    def cancel_task(self, event: TaskCancelled) -> Task | None:
        """The first reason counts. None for a task that is not open."""
        task = self.tasks.get(event.task_id)
        if task is not None and task.cancel_reason is None:
            task.cancel_reason = event.reason or "cancelled"
        return task

    def on_group_opened(self, task_id: str) -> Task | None:
        """GroupOpened was read; its time is in `finished`."""
        task = self.tasks.get(task_id)
        if task is not None and task.opened_at is None:
            task.opened_at = self.finished.opened_at(task_id)
            self._opening.discard(task_id)
        return task

    def on_members_fixed(self, task_id: str) -> Task | None:
        """GroupMembersFixed was read: the first one counts, and it closes the group."""
        task = self.tasks.get(task_id)
        if task is not None:
            task.is_fixed = True
            task.opened_at = task.opened_at or 0.0
            self._opening.discard(task_id)
        return task

    def on_session(self, event: LifecycleEvent, now: float) -> Task | None:
        """A lifecycle event; its task, or None when that is not open (yet).

        Raises IllegalTransitionError, and ValueError for an id of another form.
        """
        task_id, number, _, _ = parse_session_id(event.session_id)
        task = self.tasks.get(task_id)
        session = self._sessions.get(event.session_id)
        if session is None:
            if not isinstance(event, SessionRequested) or (task is None and not self._is_catching_up):
                return None
            if task is not None and number >= len(task.members):
                raise ValueError(f"{event.session_id}: the task has {len(task.members)} members")
            session = Session(
                event.session_id, event.group_id, event.node_id, event.gateway_id, requested_at=now
            )
            self._track(session)
            if task is not None:
                self._claim(task, session)
            else:
                self._unclaimed.setdefault(task_id, []).append(session)
        _advance(session, event)
        if session.state.is_terminal:
            self.live.pop(session.session_id, None)
        return task

    def end_catch_up(self) -> None:
        """All topics were read to their end: sessions without a task belong to closed ones."""
        self._is_catching_up = False
        for sessions in self._unclaimed.values():
            for session in sessions:
                self._forget(session)
        self._unclaimed.clear()

    def _track(self, session: Session) -> None:
        self._sessions[session.session_id] = session
        self.live[session.session_id] = session

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.session_id, None)
        self.live.pop(session.session_id, None)

    def _claim(self, task: Task, session: Session) -> None:
        number = parse_session_id(session.session_id)[1]
        if number < len(task.members):
            task.members[number].add(session)
        else:
            self._forget(session)

    # -- decisions ------------------------------------------------------------------------

    def settle(self, task: Task, now: float) -> list[Emit]:
        """Everything that must be written for a task as it stands now."""
        if task.opened_at is None:
            return self.open_group(task, now) if task.cancel_reason is not None else []
        out: list[Emit] = []
        for member in task.members:
            for session in member.sessions:
                out += self._settle_session(task, session, now, is_current=session is member.current)
            if self._waits(task, member) and not member.is_queued:
                member.is_queued = True
                heapq.heappush(self._queue, (task.order, member.number, task.task_id))
        if not task.is_fixed:
            out += self._settle_members(task, now)
        elif all(session.state.is_terminal for member in task.members for session in member.sessions):
            self._remove(task)
        return out

    def open_group(self, task: Task, now: float) -> list[Emit]:
        """Write GroupOpened; nothing else of the group is written before it was read back."""
        if task.opened_at is not None or not _is_due(task.open_written_at, now, self._limits.retry_after):
            return []
        task.open_written_at = now
        self._opening.add(task.task_id)
        event = GroupOpened(
            group_id=task.task_id,
            policy=task.spec.policy,
            size=task.spec.num_samples,
            reward=task.spec.reward,
        )
        return [Emit(event, headers={OPENED_AT: f"{now:.3f}"})]

    def place(self, task: Task, member: Member, node_id: str, gateway_id: str, now: float) -> Emit:
        """Request the member's next attempt on a node."""
        identity = session_id(task.task_id, member.number, member.next_attempt, self.epoch)
        session = Session(identity, task.task_id, node_id, gateway_id, requested_at=now)
        self._track(session)
        member.add(session)
        return Emit(_requested(session))

    def lose(self, session: Session, reason: str, now: float) -> list[Emit]:
        """Give a session up. It ends when the decision is read back."""
        if not _is_due(session.lost_at, now, self._limits.retry_after):
            return []
        session.lost_at = now
        return [Emit(SessionLost(session_id=session.session_id, group_id=session.group_id, reason=reason))]

    def start(self, session: Session, task: Task, gateway_url: str, now: float) -> list[Emit]:
        """Send StartSession (again); the node knows a session by its id."""
        session.started_at = now
        command = StartSession(
            node_id=session.node_id,
            session_id=session.session_id,
            group_id=session.group_id,
            gateway_id=session.gateway_id,
            gateway_url=gateway_url,
            runtime_digest=task.runtime_digest,
            task=task.spec,
        )
        out = [Emit(command)]
        if task.is_stopped:
            out.append(cancel_command(session, task.cancel_reason or "group deadline"))
        return out

    def retry_request(self, session: Session, now: float) -> list[Emit]:
        """Write SessionRequested again when it was not read back in time."""
        if session.state is not SessionState.NEW or now - session.requested_at < self._limits.retry_after:
            return []
        session.requested_at = now
        return [Emit(_requested(session))]

    def fix_members(self, task: Task, now: float, *, at_deadline: bool = False) -> list[Emit]:
        """Write GroupMembersFixed: members that did not end count as cancelled."""
        if not _is_due(task.fix_written_at, now, self._limits.retry_after):
            return []
        task.fix_written_at = now
        reason = "deadline" if at_deadline else "all_ended" if task.cancel_reason is None else "cancelled"
        unfinished = "group deadline" if at_deadline else task.cancel_reason or ""
        event = GroupMembersFixed(
            group_id=task.task_id,
            members=tuple(task.member_as_it_is(member, self.epoch, unfinished) for member in task.members),
            superseded=tuple(item for member in task.members for item in member.superseded()),
            reason=reason,
        )
        return [Emit(event)]

    def _settle_session(self, task: Task, session: Session, now: float, *, is_current: bool) -> list[Emit]:
        if session.state.is_terminal:
            needs_abandon = session.state is SessionState.LOST or not session.is_sealed
            if not needs_abandon or session.is_abandoned:
                return []
            session.is_abandoned = True
            return [
                Emit(
                    SessionAbandoned(
                        session_id=session.session_id, group_id=session.group_id, reason=session.reason
                    )
                )
            ]
        is_wanted = is_current and not task.is_stopped
        if is_wanted or session.cancelled_at is not None or session.state is SessionState.NEW:
            return []
        session.cancelled_at = now
        return [
            cancel_command(session, task.cancel_reason or "group deadline" if is_current else "superseded")
        ]

    def _settle_members(self, task: Task, now: float) -> list[Emit]:
        done = all(
            member.has_ended(task.spec.max_attempts) or (task.is_stopped and not _is_running(member))
            for member in task.members
        )
        return self.fix_members(task, now) if done else []

    def _waits(self, task: Task, member: Member) -> bool:
        return (
            task.opened_at is not None
            and not task.is_stopped
            and not _is_running(member)
            and not member.has_ended(task.spec.max_attempts)
        )

    def _remove(self, task: Task) -> None:
        del self.tasks[task.task_id]
        for member in task.members:
            for session in member.sessions:
                self._forget(session)

    # -- the queue ------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Members in the queue, stale entries included."""
        return len(self._queue)

    @property
    def num_opening_members(self) -> int:
        """Members of groups that are about to open."""
        return sum(self.tasks[task_id].spec.num_samples for task_id in self._opening)

    def first_waiting(self) -> tuple[Task, Member] | None:
        """The member that is served next: of the earliest task, the lowest number."""
        while self._queue:
            _, number, task_id = self._queue[0]
            task = self.tasks.get(task_id)
            if task is not None and self._waits(task, task.members[number]):
                return task, task.members[number]
            self.take_waiting()
        return None

    def take_waiting(self) -> None:
        """Remove the head of the queue."""
        _, number, task_id = heapq.heappop(self._queue)
        task = self.tasks.get(task_id)
        if task is not None:
            task.members[number].is_queued = False

    def unopened(self) -> Iterator[Task]:
        """Tasks whose group is not open, by arrival."""
        return (
            task for task in self.tasks.values() if task.open_written_at is None and task.opened_at is None
        )


def cancel_command(session: Session, reason: str) -> Emit:
    """CancelSession to the node that holds the session."""
    return Emit(CancelSession(node_id=session.node_id, session_id=session.session_id, reason=reason))


def _requested(session: Session) -> Event:
    return SessionRequested(
        session_id=session.session_id,
        group_id=session.group_id,
        node_id=session.node_id,
        gateway_id=session.gateway_id,
    )


def _advance(session: Session, event: LifecycleEvent) -> None:
    before = session.state
    session.state = apply(before, event)
    if before.is_terminal:
        return
    match event:
        case SessionReady():
            session.reached_gateway = True
        case SessionFinished():
            session.outcome, session.reason = event.outcome, event.reason
            session.is_sealed = event.sealed
        case SessionLost():
            session.reason = event.reason
        case _:
            pass


def _is_running(member: Member) -> bool:
    current = member.current
    return current is not None and not current.state.is_terminal


def _is_due(written_at: float | None, now: float, retry_after: float) -> bool:
    return written_at is None or now - written_at >= retry_after
