"""The measurements: each runs its candidates in turn, round by round, and gives medians.

CPU is that of the whole process tree of a gateway, while broker, engine and load generator run beside it
on other processors. It moves little on a busy machine; wall times do.
"""

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.gateway.deployment import Gateway, MockEngine
from bench.gateway.load import CHAT_PATH, Timings, closed_loop, open_loop, request
from bench.gateway.processes import Process
from bench.gateway.workload import LOADS, Load, first_request

_WARM_CALLS = 40


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers chat calls."""

    name: str
    port: int
    processes: tuple[Process, ...]
    keys: Callable[[int], Sequence[str]]
    """API keys for so many calls."""
    path: str = CHAT_PATH

    def requests(self, body: bytes, count: int) -> list[bytes]:
        """`count` calls, each with a key of its own."""
        return [request(self.port, body, key=key, path=self.path) for key in self.keys(count)]

    def cpu_seconds(self) -> float:
        """CPU time so far."""
        return sum(process.cpu_seconds() for process in self.processes)


def gateway_target(gateway: Gateway) -> Target:
    """polar's gateway; every call is the first of a session of its own."""
    return Target(gateway.name, gateway.port, (gateway.process,), gateway.keys)


def direct_target(engine: MockEngine) -> Target:
    """No gateway at all."""
    return Target("direct", engine.port, (engine.process,), lambda count: ["none"] * count)


@dataclass(frozen=True, slots=True)
class Closed:
    """Medians over the rounds of a closed loop."""

    cpu_us: float
    """CPU of the target per call."""
    wall_rps: float
    p50_ms: float
    p99_ms: float

    @property
    def rps_per_core(self) -> float:
        """Calls that one processor carries."""
        return 1e6 / self.cpu_us

    def figures(self) -> dict[str, float]:
        """For the report."""
        return {
            "cpu_us": self.cpu_us, "rps_per_core": self.rps_per_core, "wall_rps": self.wall_rps,
            "p50_ms": self.p50_ms, "p99_ms": self.p99_ms,
        }  # fmt: skip


def closed_loops(
    targets: Sequence[Target], load: Load, *, calls: int, in_flight: int, rounds: int
) -> dict[str, Closed]:
    """Unstreamed first calls, as fast as they are answered."""
    body = first_request(load)
    seen: dict[str, list[tuple[float, Timings]]] = {target.name: [] for target in targets}
    for target in targets:
        run(closed_loop(target.port, target.requests(body, _WARM_CALLS), in_flight), target.name)
    for _ in range(rounds):
        for target in targets:
            requests = target.requests(body, calls)
            before = target.cpu_seconds()
            timings = run(closed_loop(target.port, requests, in_flight), target.name)
            seen[target.name].append((target.cpu_seconds() - before, timings))
    return {
        name: Closed(
            cpu_us=statistics.median(1e6 * cpu / calls for cpu, _ in results),
            wall_rps=statistics.median(calls / timings.wall for _, timings in results),
            p50_ms=statistics.median(quantile(timings.seconds, 0.5) for _, timings in results),
            p99_ms=statistics.median(quantile(timings.seconds, 0.99) for _, timings in results),
        )
        for name, results in seen.items()
    }


def added_latency(
    target: Target, direct: Target, *, in_flight: int, wait_ms: int, calls: int, rounds: int
) -> dict[str, float]:
    """What a gateway adds at Poisson arrivals to an engine that answers after `wait_ms`."""
    body = first_request(LOADS["5k"], wait_ms=wait_ms)
    per_second = in_flight * 1000 / wait_ms
    p50, p99 = [], []
    for number in range(rounds):
        ours, bare = (
            run(open_loop(one.port, one.requests(body, calls), per_second, number), one.name)
            for one in (target, direct)
        )
        p50.append(quantile(ours.seconds, 0.5) - quantile(bare.seconds, 0.5))
        p99.append(quantile(ours.seconds, 0.99) - quantile(bare.seconds, 0.99))
    return {"p50_ms": statistics.median(p50), "p99_ms": statistics.median(p99)}


def streaming(
    target: Target, direct: Target, *, streams: int, gap_ms: int, calls: int, rounds: int
) -> dict[str, float]:
    """Streams of one event a token, `gap_ms` apart."""
    load = LOADS["5k"]
    body = first_request(load, stream=True, gap_ms=gap_ms)
    events = load.sampled + 3
    cpu, ttft = [], []
    for _ in range(rounds):
        requests = target.requests(body, calls)
        before = target.cpu_seconds()
        ours = run(closed_loop(target.port, requests, streams), target.name)
        cpu.append(1e6 * (target.cpu_seconds() - before) / (calls * events))
        bare = run(closed_loop(direct.port, direct.requests(body, calls), streams), direct.name)
        ttft.append(quantile(ours.first, 0.5) - quantile(bare.first, 0.5))
    return {"cpu_us_per_event": statistics.median(cpu), "ttft_added_ms_p50": statistics.median(ttft)}


def run(work: Any, name: str) -> Timings:
    """Carry out a load; a failed call makes the figures worthless and is raised."""
    timings: Timings = asyncio.run(work)
    if timings.failed:
        raise RuntimeError(f"{timings.failed} calls to {name} failed; the first: {timings.trouble}")
    return timings


def quantile(seconds: Sequence[float], share: float) -> float:
    """In milliseconds."""
    ordered = sorted(seconds)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]
