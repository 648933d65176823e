"""The grouper: trajectories, rewards and group events of one partition number → ScoredGroups.

The decision is GroupSealed: it names the trajectories and rewards that count. The stage writes
it when nothing more is to be waited for or the time for rewards is over, reads it back, obeys
the first one by offset, and emits ScoredGroups in the order of their seals. The three topics
have no order among them: a record whose group is not known yet waits, within bounds.

Bounds: open groups (at the limit the oldest are sealed as cancelled, at twice the limit new
ones become dead letters), waiting records, remembered closed groups.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from polar.core.advantages import AdvantageRule
from polar.core.grouping import GroupState, SealReason
from polar.core.metrics import Metrics
from polar.core.open_keys import OpenKeys
from polar.core.stage import DeadLettered, Emit, LogRecord, Output, Partition
from schemas.group_events import GroupMembersFixed, GroupOpened, GroupSealed
from schemas.ids import trajectory_id
from schemas.rewards import Reward
from schemas.sessions import Outcome
from schemas.topics import GROUP_EVENTS, REWARDS, TRAJECTORIES, TopicSpec
from schemas.trajectories import Trajectory

TOPICS = (GROUP_EVENTS, TRAJECTORIES, REWARDS)

SEAL_PARTITION = "seal-partition"
SEAL_OFFSET = "seal-offset"
"""Headers of a ScoredGroup: coordinates of its GroupSealed."""

_REMEMBERED_CLOSED = 4096


@dataclass(frozen=True, slots=True)
class GrouperWaits:
    """How long the grouper waits, in seconds."""

    unknown_group: float = 60.0
    """A trajectory or reward waits so long for the GroupOpened of its group …"""
    quiet: float = 5.0
    """… and goes on waiting until no group event came for so long (a stage that lags reads
    them all the time) …"""
    unknown_group_at_most: float = 600.0
    """… or until it waited so long."""
    trajectory: float = 3600.0
    """From fixed members; then a group is sealed without the trajectories that are missing."""
    failed_member_rewards: float = 2.0
    """From fixed members; rewards of failed members count when they arrive in this time."""


@dataclass(slots=True)
class _Group:
    """An open group."""

    state: GroupState
    number: int
    """Partition number that it lives in."""
    fixed_at: float = 0.0
    asked: bool = False
    """A seal was written and is not read back yet."""
    sealed: GroupSealed | None = None
    sealed_at: float = 0.0
    seal_offset: int = -1
    sealed_before_start: bool = False
    """The seal lay on the log when this process started."""
    records: dict[str, LogRecord] = field(default_factory=dict)
    """Records by trajectory or reward id, to list those that the seal leaves out."""

    def has_members(self) -> bool:
        """Whether the members are fixed, where the seal needs them: a group that was opened by a
        repeated GroupOpened behind the first one has none."""
        return self.state.fixed is not None or self.sealed is None or self.sealed.reason == "cancelled"

    def has_sealed_parts(self) -> bool:
        """Whether everything that the seal lists is there."""
        sealed = self.sealed
        return sealed is not None and all(
            part in self.records for part in (*sealed.trajectory_ids, *sealed.reward_ids)
        )


class GrouperCore:
    """StageCore over polar.trajectories.v1, polar.rewards.v1 and polar.group-events.v1."""

    def __init__(
        self,
        *,
        max_open_groups: int = 5000,
        max_waiting: int = 10_000,
        waits: GrouperWaits | None = None,
        rule: AdvantageRule | None = None,
    ) -> None:
        """`max_waiting`: records that may wait for their group to be opened. `rule`: for groups
        whose task asks for no estimator."""
        self._max_open = max_open_groups
        self._max_waiting = max_waiting
        self._waits = waits or GrouperWaits()
        self._rule = rule or AdvantageRule()
        self._keys = OpenKeys(2 * max_open_groups)
        self._groups: dict[str, _Group] = {}
        """Open groups in order of opening."""
        self._queues: dict[int, deque[str]] = {}
        """Partition number → sealed groups that are not emitted yet, in order of their seals."""
        self._waiting: OrderedDict[str, list[tuple[LogRecord, float]]] = OrderedDict()
        self._num_waiting = 0
        self._last_event: dict[int, float] = {}
        """Partition number → time of the last group event."""
        self._closed: OrderedDict[str, frozenset[str]] = OrderedDict()
        """Recently closed group → ids that it counted or listed."""
        self._counts = dict.fromkeys(
            (
                "groups_emitted", "duplicates", "late_trajectories", "late_rewards",
                "closed_before_start", "unknown_group_events", "not_counted", "refused_groups",
            ),
            0,
        )  # fmt: skip

    # -- StageCore ----------------------------------------------------------------------

    def on_assigned(self, ends: Mapping[Partition, tuple[int, int]]) -> None:
        """Start reading these partitions; equal numbers of the three topics come together."""
        self._keys.assigned(ends)

    def on_revoked(self, partitions: Iterable[Partition]) -> None:
        """Forget the groups of these partitions."""
        gone = {partition.number for partition in partitions}
        for group_id in self._keys.revoked(partitions):
            self._groups.pop(group_id, None)
        for group_id in [g for g, held in self._waiting.items() if held[0][0].partition.number in gone]:
            self._stop_waiting(group_id)
            self._keys.close(group_id)
        for number in gone:
            self._queues.pop(number, None)

    def on_record(self, record: LogRecord, now: float) -> list[Output]:
        """Take one record; decide and emit where it completes something."""
        event = record.event
        outputs: list[Output] = []
        if record.partition.topic == GROUP_EVENTS.suffix:
            self._last_event[record.partition.number] = now
        if isinstance(event, GroupOpened):
            outputs = self._open(record, event, now)
        elif isinstance(event, GroupMembersFixed):
            outputs = self._fix(event, now)
        elif isinstance(event, GroupSealed):
            outputs = self._take_seal(record, event, now)
        elif isinstance(event, (Trajectory, Reward)):
            outputs = self._take_part(record, event, now)
        self._keys.seen(record)
        return outputs

    def on_caught_up(self, partition: Partition, now: float) -> list[Output]:
        """Own seals were read back: from here on the partition's groups may be decided."""
        outputs = self._emit_ready(partition.number, now)
        if partition.topic == GROUP_EVENTS.suffix:
            for group_id in [g for g, group in self._groups.items() if group.number == partition.number]:
                outputs += self._decide(group_id, now)
        return outputs

    def on_tick(self, now: float) -> list[Output]:
        """Decide what time decides; let go of records whose group never came."""
        outputs: list[Output] = []
        for group_id, group in list(self._groups.items()):
            if group.state.fixed is not None:
                outputs += self._decide(group_id, now)
        outputs += self._cancel_surplus()
        for number in list(self._queues):
            outputs += self._emit_ready(number, now)
        outputs += self._give_up_waiting(now)
        return outputs

    def commit_offsets(self) -> Mapping[Partition, int]:
        """Never above the first record of an open group, nor of one that waits."""
        return self._keys.commit_offsets()

    def metrics(self) -> Metrics:
        """Open groups, sealed and not emitted, records held, and counters since the start."""
        return {
            "open_groups": len(self._groups),
            "sealed_groups": sum(map(len, self._queues.values())),
            "held_records": sum(len(group.records) for group in self._groups.values()),
            "waiting_records": self._num_waiting,
            **self._counts,
        }

    # -- records ------------------------------------------------------------------------

    def _open(self, record: LogRecord, event: GroupOpened, now: float) -> list[Output]:
        group_id = event.group_id
        if group_id in self._groups or group_id in self._closed:
            self._counts["duplicates"] += 1
            return []
        if self._keys.is_full:
            self._counts["refused_groups"] += 1
            return [DeadLettered(record, "too_many_open_groups", f"{len(self._groups)} are open")]
        self._keys.open(group_id, record)
        self._groups[group_id] = _Group(GroupState(event), record.partition.number)
        outputs: list[Output] = []
        for part, _ in self._stop_waiting(group_id):
            outputs += self._take_part(part, part.event, now)
        return outputs

    def _fix(self, event: GroupMembersFixed, now: float) -> list[Output]:
        group = self._groups.get(event.group_id)
        if group is None or group.state.fixed is not None:
            self._counts["unknown_group_events" if group is None else "duplicates"] += 1
            return []
        group.state.fixed, group.fixed_at = event, now
        return self._decide(event.group_id, now)

    def _take_seal(self, record: LogRecord, event: GroupSealed, now: float) -> list[Output]:
        group = self._groups.get(event.group_id)
        if group is None or group.sealed is not None:
            self._counts["unknown_group_events" if group is None else "duplicates"] += 1
            return []
        group.sealed, group.sealed_at, group.seal_offset = event, now, record.offset
        group.sealed_before_start = self._keys.in_catch_up_zone(record)
        self._queues.setdefault(group.number, deque()).append(event.group_id)
        return self._emit_ready(group.number, now)

    def _take_part(self, record: LogRecord, event: object, now: float) -> list[Output]:
        if not isinstance(event, (Trajectory, Reward)):
            return []
        part_id = event.trajectory_id if isinstance(event, Trajectory) else event.reward_id
        group = self._groups.get(event.group_id)
        if group is None:
            return self._take_unknown(record, event.group_id, part_id, now)
        if part_id in group.records:
            self._counts["duplicates"] += 1
            return []
        group.records[part_id] = record
        self._keys.hold(event.group_id, record.partition, record.offset)
        if isinstance(event, Trajectory):
            group.state.trajectories[part_id] = event
        else:
            group.state.rewards[part_id] = event
        if group.sealed is not None:
            return self._emit_ready(group.number, now)
        return self._decide(event.group_id, now)

    def _take_unknown(self, record: LogRecord, group_id: str, part_id: str, now: float) -> list[Output]:
        closed = self._closed.get(group_id)
        if closed is not None:
            if part_id in closed:
                self._counts["duplicates"] += 1
                return []
            return self._late(record)
        self._waiting.setdefault(group_id, []).append((record, now))
        self._num_waiting += 1
        self._keys.hold(group_id, record.partition, record.offset)
        outputs: list[Output] = []
        while self._num_waiting > self._max_waiting:
            outputs += self._let_go(next(iter(self._waiting)))
        return outputs

    # -- decisions ----------------------------------------------------------------------

    def _decide(self, group_id: str, now: float) -> list[Output]:
        """Write the seal once nothing more is to be waited for."""
        group = self._groups[group_id]
        if group.asked or group.sealed is not None or not self._may_decide(group.number):
            return []
        reason = self._seal_reason(group, now)
        return [] if reason is None else self._ask(group, reason)

    def _ask(self, group: _Group, reason: SealReason) -> list[Output]:
        group.asked = True
        return [Emit(group.state.seal(reason))]

    def _may_decide(self, number: int) -> bool:
        """Whether own seals of before the start were read back."""
        return self._has_read(GROUP_EVENTS, number)

    def _has_read_all(self, number: int) -> bool:
        """Whether the catch-up zones of all three topics were processed."""
        return all(self._has_read(topic, number) for topic in TOPICS)

    def _has_read(self, topic: TopicSpec, number: int) -> bool:
        return self._keys.is_caught_up(Partition(topic.suffix, number))

    def _seal_reason(self, group: _Group, now: float) -> SealReason | None:
        state = group.state
        if state.fixed is None:
            return None
        waited = now - group.fixed_at
        if not state.has_all_trajectories() and waited < self._waits.trajectory:
            return None
        if state.fixed.reason == "cancelled":
            return "cancelled"
        if waited >= state.opened.reward.timeout_seconds:
            return "reward_timeout"
        if not state.has_all_trajectories() or not state.has_all_rewards(Outcome.COMPLETED):
            return None
        failed_may_come = waited < self._waits.failed_member_rewards
        if failed_may_come and not state.has_all_rewards(Outcome.AGENT_ERROR):
            return None
        return "complete"

    def _cancel_surplus(self) -> list[Output]:
        surplus = len(self._groups) - self._max_open
        outputs: list[Output] = []
        for group in self._groups.values():
            if surplus <= 0:
                break
            surplus -= 1
            if not group.asked and group.sealed is None and self._may_decide(group.number):
                outputs += self._ask(group, "cancelled")
        return outputs

    # -- emission -----------------------------------------------------------------------

    def _emit_ready(self, number: int, now: float) -> list[Output]:
        """ScoredGroups leave in the order of their seals, each once its parts are there."""
        outputs: list[Output] = []
        queue = self._queues.get(number, deque())
        while queue:
            group = self._groups[queue[0]]
            is_whole = group.has_sealed_parts()
            if not is_whole and not self._has_read_all(number):
                break
            if group.sealed_before_start and not (is_whole and group.has_members()):
                # Commits never pass a part of an open group: it was closed before the restart,
                # and is read again because another group is still open.
                self._counts["closed_before_start"] += len(group.records)
                self._close(queue.popleft())
                continue
            if not is_whole and now - group.sealed_at < self._waits.unknown_group:
                break
            outputs += self._emit(queue.popleft())
        return outputs

    def _emit(self, group_id: str) -> list[Output]:
        group = self._close(group_id)
        sealed = group.sealed
        if sealed is None:
            return []
        headers = {SEAL_PARTITION: str(group.number), SEAL_OFFSET: str(group.seal_offset)}
        outputs: list[Output] = [Emit(group.state.score(sealed, group.state.rule(self._rule)), headers)]
        fixed = group.state.fixed
        superseded = {item.id for item in fixed.superseded} if fixed is not None else set()
        known = {*sealed.trajectory_ids, *sealed.reward_ids, *map(trajectory_id, superseded)}
        for part_id, record in group.records.items():
            if part_id in known or getattr(record.event, "session_id", "") in superseded:
                continue
            self._counts["not_counted"] += 1
            outputs.append(DeadLettered(record, "not_counted", f"the seal of {group_id} leaves it out"))
        self._counts["groups_emitted"] += 1
        return outputs

    def _close(self, group_id: str) -> _Group:
        """Forget a group but for its ids."""
        group = self._groups.pop(group_id)
        self._keys.close(group_id)
        listed = (*group.sealed.trajectory_ids, *group.sealed.reward_ids) if group.sealed else ()
        self._closed[group_id] = frozenset((*listed, *group.records))
        while len(self._closed) > _REMEMBERED_CLOSED:
            self._closed.popitem(last=False)
        return group

    # -- late records -------------------------------------------------------------------

    def _give_up_waiting(self, now: float) -> list[Output]:
        outputs: list[Output] = []
        for group_id, held in list(self._waiting.items()):
            record, arrived = held[0]
            number, waited = record.partition.number, now - arrived
            if waited < self._waits.unknown_group:
                break
            is_quiet = now - self._last_event.get(number, arrived) >= self._waits.quiet
            if self._may_decide(number) and (is_quiet or waited >= self._waits.unknown_group_at_most):
                outputs += self._let_go(group_id)
        return outputs

    def _let_go(self, group_id: str) -> list[Output]:
        outputs: list[Output] = []
        for record, _ in self._stop_waiting(group_id):
            if self._keys.in_catch_up_zone(record):
                self._counts["closed_before_start"] += 1
            else:
                outputs += self._late(record)
        self._keys.close(group_id)
        return outputs

    def _stop_waiting(self, group_id: str) -> list[tuple[LogRecord, float]]:
        held = self._waiting.pop(group_id, [])
        self._num_waiting -= len(held)
        return held

    def _late(self, record: LogRecord) -> list[Output]:
        is_reward = isinstance(record.event, Reward)
        self._counts["late_rewards" if is_reward else "late_trajectories"] += 1
        reason = "late_reward" if is_reward else "late_trajectory"
        return [DeadLettered(record, reason, f"no open group {record.key}")]
