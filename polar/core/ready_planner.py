"""The READY buffer: how many idle runtimes of which kind each node shall hold.

Commands are levels (PrewarmRuntime.count). What a node may hold is bounded by what its last
heartbeat showed and by every level that it may not have seen yet. Before the first level of
an epoch raises anything, each node acknowledges one command, which proves that no command of
an earlier scheduler is still on its way.

Invariant: over the nodes in sight, idle runtimes of the digests in sight, warm and warming,
never exceed the target; when nothing else changes they reach it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from schemas.nodes import NodeHeartbeat, PrewarmRuntime
from schemas.tasks import TaskRequest


@dataclass(frozen=True, slots=True)
class Demand:
    """A runtime digest in sight."""

    digest: str
    task: TaskRequest
    num_waiting: int
    """Members of open tasks that wait for a node."""


@dataclass(slots=True)
class _NodeLevels:
    incarnation: str
    asked: dict[str, int] = field(default_factory=dict)
    """Digest → level that was last sent."""
    unseen: deque[tuple[int, str, int]] = field(default_factory=deque)
    """(number, digest, level) of commands that no heartbeat has acknowledged."""
    first_number: int | None = None
    """Number of the first command to this incarnation in this epoch."""
    is_synced: bool = False

    def acknowledge(self, number: int) -> None:
        while self.unseen and self.unseen[0][0] <= number:
            self.unseen.popleft()
        if self.first_number is not None and number >= self.first_number:
            self.is_synced = True

    def bound(self, digest: str, held: int) -> int:
        """The most idle runtimes of the digest that the node may hold or make."""
        unseen = (level for _, name, level in self.unseen if name == digest)
        return max(held, self.asked.get(digest, 0), *unseen, 0)


class ReadyPlanner:
    """Levels of all nodes in one epoch of the scheduler."""

    def __init__(self, target: int, epoch: int) -> None:
        self._target = target
        self._epoch = epoch
        self._number = 0
        self._nodes: dict[str, _NodeLevels] = {}

    def plan(
        self, nodes: Sequence[NodeHeartbeat], demands: Sequence[Demand], *, may_raise: bool = True
    ) -> list[PrewarmRuntime]:
        """Commands that bring the nodes nearer to the target.

        `nodes`: last heartbeats of the nodes that take work; a node left out is forgotten.
        `demands`: digests in sight in order of arrival; none keeps the levels as they are.
        `may_raise`: False while a node that may hold runtimes has not been heard yet.
        """
        self._refresh(nodes)
        if not demands or not nodes:
            return []
        shares = self._shares(nodes, _wanted(self._target, demands))
        commands: list[PrewarmRuntime] = []
        tasks = {demand.digest: demand.task for demand in demands}
        for node in nodes:
            commands += self._lower(node, shares, tasks, demands[-1].task)
        if may_raise and all(self._nodes[node.node_id].is_synced for node in nodes):
            commands += self._raise(nodes, shares, demands)
        return commands

    def _refresh(self, nodes: Sequence[NodeHeartbeat]) -> None:
        present = {node.node_id for node in nodes}
        for node_id in [node_id for node_id in self._nodes if node_id not in present]:
            del self._nodes[node_id]
        for node in nodes:
            levels = self._nodes.get(node.node_id)
            if levels is None or levels.incarnation != node.incarnation:
                levels = self._nodes[node.node_id] = _NodeLevels(node.incarnation)
            epoch, _, number = node.last_command.partition("/")
            if epoch == str(self._epoch) and number.isdigit():
                levels.acknowledge(int(number))

    def _shares(
        self, nodes: Sequence[NodeHeartbeat], wanted: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, str], int]:
        """(node, digest) → level. Runtimes stay where they are asked for already."""
        shares: dict[tuple[str, str], int] = {}
        room = {node.node_id: node.max_ready for node in nodes}
        for digest, count in wanted:
            for _ in range(count):
                candidates = [node_id for node_id, left in room.items() if left > 0]
                if not candidates:
                    return shares

                def preference(node_id: str, digest: str = digest) -> tuple[bool, int, str]:
                    asked = self._nodes[node_id].asked.get(digest, 0)
                    taken = shares.get((node_id, digest), 0)
                    return taken >= asked, -room[node_id], node_id

                chosen = min(candidates, key=preference)
                room[chosen] -= 1
                shares[chosen, digest] = shares.get((chosen, digest), 0) + 1
        return shares

    def _lower(
        self,
        node: NodeHeartbeat,
        shares: dict[tuple[str, str], int],
        tasks: dict[str, TaskRequest],
        any_task: TaskRequest,
    ) -> list[PrewarmRuntime]:
        """Levels that sink, and the first commands to a node, which raise nothing."""
        levels = self._nodes[node.node_id]
        is_first = levels.first_number is None
        commands = []
        for digest in sorted({*node.ready_digests, *levels.asked}):
            share = shares.get((node.node_id, digest), 0)
            held = node.ready_digests.get(digest, 0)
            # After a start `asked` is empty although the node follows older levels.
            asked = levels.asked.get(digest, held)
            if share < asked:
                commands.append(self._command(node.node_id, digest, share, tasks.get(digest, any_task)))
        if is_first:
            for digest, task in tasks.items():
                share = shares.get((node.node_id, digest), 0)
                count = min(node.ready_digests.get(digest, 0), share)
                commands.append(self._command(node.node_id, digest, count, task))
        return commands

    def _raise(
        self, nodes: Sequence[NodeHeartbeat], shares: dict[tuple[str, str], int], demands: Sequence[Demand]
    ) -> list[PrewarmRuntime]:
        def bound(node: NodeHeartbeat, digest: str) -> int:
            return self._nodes[node.node_id].bound(digest, node.ready_digests.get(digest, 0))

        left = self._target - sum(bound(node, demand.digest) for node in nodes for demand in demands)
        commands = []
        for demand in demands:
            for node in nodes:
                now_bound = bound(node, demand.digest)
                level = min(shares.get((node.node_id, demand.digest), 0), now_bound + max(left, 0))
                if level > self._nodes[node.node_id].asked.get(demand.digest, 0):
                    left -= max(level - now_bound, 0)
                    commands.append(self._command(node.node_id, demand.digest, level, demand.task))
        return commands

    def _command(self, node_id: str, digest: str, count: int, task: TaskRequest) -> PrewarmRuntime:
        self._number += 1
        levels = self._nodes[node_id]
        levels.asked[digest] = count
        levels.unseen.append((self._number, digest, count))
        if levels.first_number is None:
            levels.first_number = self._number
        return PrewarmRuntime(
            node_id=node_id,
            command_id=f"{self._epoch}/{self._number}",
            runtime_digest=digest,
            count=count,
            task=task,
        )


def _wanted(target: int, demands: Sequence[Demand]) -> list[tuple[str, int]]:
    """(digest, count): waiting members first, what is left for the newest digest."""
    counts: dict[str, int] = {}
    left = target
    for demand in demands:
        counts[demand.digest] = min(demand.num_waiting, left)
        left -= counts[demand.digest]
    counts[demands[-1].digest] += left
    return list(counts.items())
