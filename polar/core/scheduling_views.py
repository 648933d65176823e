"""What the scheduler tells about tasks and nodes: plain values, made on demand."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from polar.core.lifecycle import SessionState
from polar.core.scheduling import SchedulerCore
from polar.core.scheduling_state import Member, Task
from schemas.group_events import GroupMember
from schemas.ids import parse_session_id
from schemas.nodes import StageCounts

TaskState = Literal["waiting", "running", "cancelling", "finished"]
GroupState = Literal["not_opened", "open", "members_fixed", "sealed"]


@dataclass(frozen=True, slots=True)
class MemberView:
    """One rollout of a task."""

    member: int
    session_id: str | None
    """Its current attempt; none before the first."""
    state: str
    """A SessionState, or `waiting`."""
    outcome: str | None
    reason: str
    attempts: int
    """Sessions so far, the current one included."""
    node_id: str | None = None


@dataclass(frozen=True, slots=True)
class TaskView:
    """A task with its members, open or finished."""

    task_id: str
    state: TaskState
    policy: str
    num_samples: int
    group: GroupState
    group_reason: str
    """Why the members were fixed, and why the group was sealed."""
    members: tuple[MemberView, ...]


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as last heard."""

    node_id: str
    seconds_since_heartbeat: float
    max_sessions: int
    counts: StageCounts
    leases: tuple[str, ...]
    is_draining: bool


def view_task(core: SchedulerCore, task_id: str) -> TaskView | None:
    """The task as far as it is known: open ones, and a bounded history."""
    task = core.book.tasks.get(task_id)
    if task is not None and not task.is_fixed:
        return _open_view(task)
    finished = core.finished.get(task_id)
    if finished is None:
        return None
    attempts: dict[int, int] = {}
    for item in finished.fixed.superseded:
        number = parse_session_id(item.id)[1]
        attempts[number] = attempts.get(number, 0) + 1
    members = tuple(
        _fixed_member(member, attempts.get(parse_session_id(member.session_id)[1], 0))
        for member in finished.fixed.members
    )
    return TaskView(
        task_id=task_id,
        state="finished",
        policy=finished.policy,
        num_samples=len(members),
        group="sealed" if finished.sealed else "members_fixed",
        group_reason=", ".join(filter(None, (finished.fixed.reason, finished.sealed))),
        members=members,
    )


def view_tasks(core: SchedulerCore) -> Iterator[TaskView]:
    """Open tasks by arrival, then finished ones, the newest first."""
    for task in core.book.tasks.values():
        if not task.is_fixed:
            yield _open_view(task)
    for task_id in core.finished:
        view = view_task(core, task_id)
        if view is not None:
            yield view


def view_nodes(core: SchedulerCore, now: float) -> list[NodeView]:
    """Nodes heard since the scheduler started."""
    return [
        NodeView(
            node_id=node.node_id,
            seconds_since_heartbeat=round(now - node.last_seen, 3),
            max_sessions=node.heartbeat.max_sessions,
            counts=node.heartbeat.counts,
            leases=node.heartbeat.leases,
            is_draining=node.heartbeat.draining,
        )
        for _, node in sorted(core.fleet.nodes.items())
        if node.heartbeat is not None and node.is_confirmed
    ]


def _open_view(task: Task) -> TaskView:
    is_open = task.opened_at is not None
    state: TaskState = "running" if is_open else "waiting"
    return TaskView(
        task_id=task.task_id,
        state="cancelling" if task.cancel_reason is not None else state,
        policy=task.spec.policy,
        num_samples=task.spec.num_samples,
        group="open" if is_open else "not_opened",
        group_reason=task.cancel_reason or "",
        members=tuple(_open_member(member) for member in task.members),
    )


def _open_member(member: Member) -> MemberView:
    current = member.current
    if current is None:
        return MemberView(member.number, None, "waiting", None, "", 0)
    state = SessionState.REQUESTED if current.state is SessionState.NEW else current.state
    return MemberView(
        member=member.number,
        session_id=current.session_id,
        state=state.value,
        outcome=current.outcome.value if current.outcome else None,
        reason=current.reason,
        attempts=len(member.sessions),
        node_id=current.node_id,
    )


def _fixed_member(member: GroupMember, earlier: int) -> MemberView:
    return MemberView(
        member=parse_session_id(member.session_id)[1],
        session_id=member.session_id,
        state=SessionState.FINISHED.value,
        outcome=member.outcome.value,
        reason=member.reason,
        attempts=earlier + 1,
    )
