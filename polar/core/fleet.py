"""Nodes and gateways as their heartbeats tell them.

Invariants: nothing is placed on a node or gateway that has not been heard since this scheduler
began to decide, heartbeats from before only say that it exists; nobody is lost for time in which
the scheduler heard nothing at all (the broker was away, or this process stood still).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from schemas.nodes import GatewayHeartbeat, NodeHeartbeat

SILENCE_SECONDS = 3.0
"""Without a record of anybody for longer than this the log is silent, not a node: heartbeats of
nodes and gateways come each second."""


@dataclass(slots=True)
class NodePresence:
    """A node and when it was last heard."""

    node_id: str
    last_seen: float
    heartbeat: NodeHeartbeat | None = None
    is_confirmed: bool = False
    """Heard since this scheduler began to decide."""
    unwanted: dict[str, float] = field(default_factory=dict)
    """Leases that no open task needs → since when."""


@dataclass(slots=True)
class GatewayPresence:
    """A gateway and when it was last heard."""

    gateway_id: str
    last_seen: float
    heartbeat: GatewayHeartbeat | None = None
    is_confirmed: bool = False


class Fleet:
    """All nodes and gateways ever heard; one row each."""

    def __init__(self, node_timeout: float, gateway_timeout: float) -> None:
        self._node_timeout = node_timeout
        self._gateway_timeout = gateway_timeout
        self.nodes: dict[str, NodePresence] = {}
        self.gateways: dict[str, GatewayPresence] = {}
        self._heard_at = 0.0

    def hear(self, now: float) -> None:
        """A record of any kind came. A silence before it counts against nobody."""
        silence = now - self._heard_at
        if silence > SILENCE_SECONDS:
            for node in self.nodes.values():
                node.last_seen = min(node.last_seen + silence, now)
            for gateway in self.gateways.values():
                gateway.last_seen = min(gateway.last_seen + silence, now)
        self._heard_at = now

    def on_node(self, heartbeat: NodeHeartbeat, now: float, *, is_fresh: bool) -> NodePresence:
        """Note a heartbeat; `is_fresh`: it came after this scheduler began to decide."""
        node = self.nodes.setdefault(heartbeat.node_id, NodePresence(heartbeat.node_id, now))
        node.heartbeat, node.last_seen = heartbeat, now
        node.is_confirmed = node.is_confirmed or is_fresh
        return node

    def on_gateway(self, heartbeat: GatewayHeartbeat, now: float, *, is_fresh: bool) -> None:
        """Note a gateway's heartbeat."""
        gateway = self.gateways.setdefault(heartbeat.gateway_id, GatewayPresence(heartbeat.gateway_id, now))
        gateway.heartbeat, gateway.last_seen = heartbeat, now
        gateway.is_confirmed = gateway.is_confirmed or is_fresh

    def begin(self, node_ids: Iterable[str], gateway_ids: Iterable[str], now: float) -> None:
        """Start all clocks: who is not heard from now on within its time-out is lost."""
        for node_id in node_ids:
            self.nodes.setdefault(node_id, NodePresence(node_id, now))
        for gateway_id in gateway_ids:
            self.gateways.setdefault(gateway_id, GatewayPresence(gateway_id, now))
        for node in self.nodes.values():
            node.last_seen = now
        for gateway in self.gateways.values():
            gateway.last_seen = now
        self._heard_at = now

    def is_node_lost(self, node_id: str, now: float) -> bool:
        """Whether its sessions must be given up."""
        node = self.nodes.get(node_id)
        return node is None or self._heard_until(now) - node.last_seen > self._node_timeout

    def is_gateway_lost(self, gateway_id: str, now: float) -> bool:
        """Whether its sessions must be abandoned."""
        gateway = self.gateways.get(gateway_id)
        return gateway is None or self._heard_until(now) - gateway.last_seen > self._gateway_timeout

    def _heard_until(self, now: float) -> float:
        return min(now, self._heard_at + SILENCE_SECONDS)

    def live_nodes(self, now: float) -> list[NodeHeartbeat]:
        """Last heartbeats of the nodes that may get work or runtimes, by id."""
        return [
            node.heartbeat
            for _, node in sorted(self.nodes.items())
            if node.heartbeat is not None
            and node.is_confirmed
            and not node.heartbeat.draining
            and now - node.last_seen <= self._node_timeout
        ]

    def is_complete(self, now: float) -> bool:
        """Whether every node that may still be there was heard since this scheduler decides."""
        return all(node.is_confirmed or self.is_node_lost(node.node_id, now) for node in self.nodes.values())

    def ready_gateways(self, now: float) -> list[GatewayHeartbeat]:
        """Last heartbeats of the gateways that take sessions, by id.

        Waiting for a silent gateway to come back is for sessions that it holds; new sessions
        go by the shorter time-out of nodes.
        """
        patience = min(self._node_timeout, self._gateway_timeout)
        return [
            gateway.heartbeat
            for _, gateway in sorted(self.gateways.items())
            if gateway.heartbeat is not None
            and gateway.is_confirmed
            and gateway.heartbeat.ready
            and now - gateway.last_seen <= patience
        ]


def free_slots(node: NodeHeartbeat, num_live: int) -> int:
    """Sessions that may still be placed on a node that has `num_live` unfinished ones.

    Sessions in POSTRUN need no run slot, so as many more may come, up to twice the capacity.
    """
    return node.max_sessions + min(node.counts.postrun, node.max_sessions) - num_live


def best_node(
    nodes: Sequence[NodeHeartbeat],
    num_live: Mapping[str, int],
    warm_left: Mapping[tuple[str, str], int],
    digest: str,
) -> NodeHeartbeat | None:
    """The node for a session: a warm runtime first, then the emptiest, then by id."""
    candidates = [node for node in nodes if free_slots(node, num_live.get(node.node_id, 0)) > 0]
    if not candidates:
        return None
    return min(
        candidates,
        key=lambda node: (
            warm_left.get((node.node_id, digest), 0) <= 0,
            num_live.get(node.node_id, 0) / node.max_sessions,
            node.node_id,
        ),
    )
