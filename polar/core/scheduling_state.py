"""What the scheduler knows about tasks, members and sessions: plain mutable records.

Written by `task_book` only. A member's current session is its highest (attempt, epoch) on the
log, so the order in which partitions are read makes no difference.
"""

from dataclasses import dataclass, field

from polar.core.lifecycle import SessionState
from schemas.group_events import GroupMember
from schemas.ids import parse_session_id
from schemas.sessions import Outcome
from schemas.tasks import TaskRequest
from schemas.trees import ListedItem


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingLimits:
    """Bounds and waits of the scheduler, in seconds where nothing else is said."""

    ready_target: int
    """Idle runtimes of the digests in sight over all nodes, warm and warming."""
    node_timeout: float
    """Without a heartbeat for so long a node is lost, and its sessions with it."""
    gateway_timeout: float
    """Without a heartbeat for so long a gateway is gone, and its sessions with it."""
    max_open_tasks: int
    max_history: int = 2000
    """Finished tasks whose members can still be looked up."""
    max_remembered: int = 200_000
    """Finished task ids that a second submission is recognised by."""
    resend_after: float = 5.0
    """A StartSession that shows in no lease, or a lease nobody wants, is acted on after this."""
    retry_after: float = 30.0
    """A decision that was not read back from the log is written again after this."""


@dataclass(slots=True)
class Session:
    """One attempt of one member."""

    session_id: str
    group_id: str
    node_id: str
    gateway_id: str
    state: SessionState = SessionState.NEW
    reached_gateway: bool = False
    """SessionReady was seen: the session is open at its gateway, a trajectory will come."""
    outcome: Outcome | None = None
    reason: str = ""
    is_sealed: bool = True
    requested_at: float = 0.0
    """When SessionRequested was written or read."""
    started_at: float | None = None
    """When StartSession was last sent."""
    cancelled_at: float | None = None
    lost_at: float | None = None
    """When SessionLost was last written."""
    unleased_since: float | None = None
    """Since when heartbeats of its node do not list it."""
    is_abandoned: bool = False

    @property
    def attempt(self) -> int:
        """Number of the attempt, from 0."""
        return parse_session_id(self.session_id)[2]

    @property
    def rank(self) -> tuple[int, int]:
        """(attempt, epoch): the highest one of a member is its current session."""
        _, _, attempt, epoch = parse_session_id(self.session_id)
        return attempt, epoch

    @property
    def is_infra_error(self) -> bool:
        """Whether it ended without the agent's fault."""
        return self.state is SessionState.LOST or self.outcome is Outcome.INFRA_ERROR


@dataclass(slots=True)
class Member:
    """One of the `num_samples` rollouts of a task."""

    number: int
    sessions: list[Session] = field(default_factory=list)
    """Attempts in order of rank."""
    is_queued: bool = False
    """Stands in the queue of members that wait for a node."""

    def add(self, session: Session) -> None:
        """Take an attempt in; the order of arrival does not matter."""
        self.sessions.append(session)
        self.sessions.sort(key=lambda one: one.rank)

    @property
    def current(self) -> Session | None:
        """The attempt that counts."""
        return self.sessions[-1] if self.sessions else None

    @property
    def next_attempt(self) -> int:
        """Number of the attempt that would follow."""
        return self.sessions[-1].attempt + 1 if self.sessions else 0

    def has_ended(self, max_attempts: int) -> bool:
        """Whether its current session ended for good."""
        current = self.current
        if current is None or not current.state.is_terminal:
            return False
        return not current.is_infra_error or self.next_attempt >= max_attempts

    def superseded(self) -> list[ListedItem]:
        """Earlier attempts with what became of them."""
        return [
            ListedItem(
                id=session.session_id,
                reason="infra_error" if session.is_infra_error else "superseded",
                detail=session.reason,
            )
            for session in self.sessions[:-1]
        ]


@dataclass(slots=True)
class Task:
    """A task that is not over."""

    task_id: str
    spec: TaskRequest
    order: int
    """Number of its arrival; earlier tasks are served first."""
    runtime_digest: str
    members: list[Member]
    open_written_at: float | None = None
    opened_at: float | None = None
    """Unix seconds of GroupOpened, from its header; None until it was read back."""
    cancel_reason: str | None = None
    fix_written_at: float | None = None
    is_fixed: bool = False
    """GroupMembersFixed was read back; what still runs is only wound up."""

    @property
    def is_stopped(self) -> bool:
        """Whether nothing of it may be started any more."""
        return self.is_fixed or self.cancel_reason is not None

    def member_as_it_is(self, member: Member, epoch: int, unfinished: str) -> GroupMember:
        """How the member counts if the group is fixed now; `unfinished` says why it did not end."""
        current = member.current
        if current is None or (current.state.is_terminal and not member.has_ended(self.spec.max_attempts)):
            never_run = f"{self.task_id}/{member.number}/{member.next_attempt}/{epoch}"
            return GroupMember(
                session_id=never_run, outcome=Outcome.CANCELLED, reason=unfinished, has_trajectory=False
            )
        outcome, reason = Outcome.CANCELLED, unfinished
        if current.state.is_terminal:
            outcome, reason = current.outcome or Outcome.INFRA_ERROR, current.reason
        return GroupMember(
            session_id=current.session_id,
            outcome=outcome,
            reason=reason,
            has_trajectory=current.reached_gateway,
        )
