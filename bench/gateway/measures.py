"""The measurements: each runs its candidates in turn, round by round, and gives medians.

CPU is that of the whole process tree of a gateway, while broker, engine and load generator run beside it
on other processors. It moves little on a busy machine; wall times do. What a gateway has yet to do when
the last answer is there (records to send, logs to write) counts: from quiet to quiet.
"""

import asyncio
import random
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gateway.deployment import Broker, Gateway, MockEngine
from bench.gateway.load import CHAT_PATH, Timings, closed_loop, open_loop, request
from bench.gateway.processes import Process
from bench.gateway.recorded import read_recorded
from bench.gateway.workload import LOADS, Load, continuing_request, first_request, ids, in_dialect, unlike
from polar.kafka.writer import LogWriter
from schemas.topics import DEAD_LETTERS

_WARM_CALLS = 40
_LOOK_SECONDS = 0.05
_QUIET_SECONDS = 0.003
"""CPU in one look of a gateway that only waits; heartbeats are in it."""
_MOST_LOOKS = 60


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers chat calls."""

    name: str
    port: int
    processes: tuple[Process, ...]
    keys: Callable[[int], Sequence[str]]
    """API keys for so many calls."""
    dialect: str = "chat"
    calls: int | None = None
    """Calls a round, where it is too slow for as many as the others get."""
    own: tuple[str, bytes] | None = None
    """(path, body) that it is asked in place of the load's."""
    session_prefix: str = ""
    """Where sessions are named in the URL: what stands in front of the path, with `{}` for the session."""

    def requests(self, body: bytes, count: int) -> list[bytes]:
        """`count` calls, each with a key of its own, or of a session of its own."""
        path, body = self.own or in_dialect(self.dialect, body)
        return [
            request(self.port, body, key=key, path=self.session_prefix.format(uuid.uuid4().hex) + path)
            for key in self.keys(count)
        ]

    def cpu_seconds(self) -> float:
        """CPU time up to where all work is done that it has now, or for three more seconds."""
        used = self._cpu_seconds()
        for _ in range(_MOST_LOOKS):
            time.sleep(_LOOK_SECONDS)
            before, used = used, self._cpu_seconds()
            if used - before < _QUIET_SECONDS:
                break
        return used

    def _cpu_seconds(self) -> float:
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
            requests = target.requests(body, target.calls or calls)
            before = target.cpu_seconds()
            timings = run(closed_loop(target.port, requests, in_flight), target.name)
            seen[target.name].append((target.cpu_seconds() - before, timings))
    return {
        name: Closed(
            cpu_us=statistics.median(1e6 * cpu / len(timings.seconds) for cpu, timings in results),
            wall_rps=statistics.median(len(timings.seconds) / timings.wall for _, timings in results),
            p50_ms=statistics.median(quantile(timings.seconds, 0.5) for _, timings in results),
            p99_ms=statistics.median(quantile(timings.seconds, 0.99) for _, timings in results),
        )
        for name, results in seen.items()
    }


def recorded_dialects(
    target: Target, folder: Path, *, calls: int, in_flight: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """By dialect: a real program's first request, and what a chat request of its size costs."""
    load = LOADS["5k"]
    recorded = read_recorded(folder, load)
    targets = []
    for name, pair in recorded.items():
        targets += [
            replace(target, name=name, own=(pair.path, pair.body)),
            replace(target, name=f"chat like {name}", own=(CHAT_PATH, pair.chat_body)),
        ]
    seen = closed_loops(targets, load, calls=calls, in_flight=in_flight, rounds=rounds)
    return {
        name: {
            "request": f"recorded of {pair.program}",
            "bytes": len(pair.body),
            "cpu_us_per_call": seen[name].cpu_us,
            "chat_cpu_us_per_call": seen[f"chat like {name}"].cpu_us,
            "ratio": seen[name].cpu_us / seen[f"chat like {name}"].cpu_us,
        }
        for name, pair in recorded.items()
    }


def unseen_calls(target: Target, load: Load, *, calls: int, in_flight: int, rounds: int) -> float:
    """CPU microseconds of first calls of which the gateway has seen no message before, only the tools."""
    body = first_request(load)
    cpu = []
    for number in range(rounds):
        bodies = [unlike(body, number * calls + call) for call in range(calls)]
        keys = zip(bodies, target.keys(calls), strict=True)
        requests = [request(target.port, each, key=key) for each, key in keys]
        before = target.cpu_seconds()
        run(closed_loop(target.port, requests, in_flight), target.name)
        cpu.append(1e6 * (target.cpu_seconds() - before) / calls)
    return statistics.median(cpu)


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
    """Streams of one event a token, `gap_ms` apart: CPU at so many, first bytes at Poisson arrivals."""
    load = LOADS["5k"]
    body = first_request(load, stream=True, gap_ms=gap_ms)
    events = load.sampled + 3
    cpu, ttft = [], []
    per_second = 1000 * streams / (load.sampled * gap_ms)
    for number in range(rounds):
        requests = target.requests(body, calls)
        before = target.cpu_seconds()
        ours = run(closed_loop(target.port, requests, streams), target.name)
        cpu.append(1e6 * (target.cpu_seconds() - before) / (calls * events))
        ours, bare = (
            run(open_loop(one.port, one.requests(body, calls), per_second, number), one.name)
            for one in (target, direct)
        )
        ttft.append(quantile(ours.first, 0.5) - quantile(bare.first, 0.5))
    return {"cpu_us_per_event": statistics.median(cpu), "ttft_added_ms_p50": statistics.median(ttft)}


def spliced(gateway: Gateway, load: Load, *, calls: int, in_flight: int, rounds: int) -> float:
    """CPU microseconds of the second call of sessions, which continues the first one's ids."""
    first, second = first_request(load), continuing_request(load)
    target = gateway_target(gateway)
    cpu = []
    for _ in range(rounds):
        keys = gateway.keys(calls)
        spliced_before = gateway.state()["prompts"]["rendering"].get("spliced", 0)
        run(closed_loop(gateway.port, [request(gateway.port, first, key=key) for key in keys], in_flight), "")
        requests = [request(gateway.port, second, key=key) for key in keys]
        before = target.cpu_seconds()
        run(closed_loop(gateway.port, requests, in_flight), gateway.name)
        cpu.append(1e6 * (target.cpu_seconds() - before) / calls)
        made = gateway.state()["prompts"]["rendering"].get("spliced", 0)
        if made - spliced_before != calls:
            raise RuntimeError(f"not every continuing call was spliced: {gateway.state()['prompts']}")
    return statistics.median(cpu)


def two_workers(one: Gateway, other: Gateway, *, calls: int, in_flight: int, rounds: int) -> dict[str, float]:
    """One worker alone, then two at once with as many calls each: CPU a call and calls a second as ratios."""
    body = first_request(LOADS["5k"])
    targets = gateway_target(one), gateway_target(other)
    cpu, wall = [], []

    async def both(requests: Sequence[list[bytes]]) -> list[Timings]:
        work = zip((one, other), requests, strict=True)
        return await asyncio.gather(*(closed_loop(g.port, each, in_flight) for g, each in work))

    for _ in range(rounds):
        alone = targets[0].requests(body, calls)
        before = targets[0].cpu_seconds()
        first = run(closed_loop(one.port, alone, in_flight), one.name)
        cpu_alone = (targets[0].cpu_seconds() - before) / calls
        together = [target.requests(body, calls) for target in targets]
        before = sum(target.cpu_seconds() for target in targets)
        timings = asyncio.run(both(together))
        cpu_both = (sum(target.cpu_seconds() for target in targets) - before) / (2 * calls)
        if any(each.failed for each in timings):
            raise RuntimeError(f"calls to two workers failed: {timings[0].trouble or timings[1].trouble}")
        cpu.append(cpu_both / cpu_alone)
        wall.append(2 * calls / max(each.wall for each in timings) / (calls / first.wall))
    return {"cpu_ratio": statistics.median(cpu), "wall_ratio": statistics.median(wall)}


def broker_acknowledgement(broker: Broker, *, records: int = 300) -> tuple[float, float]:
    """(p50, p99) in ms from a record as large as that of a first call to its acknowledgement, at the
    Poisson arrivals of 32 calls in flight."""
    return asyncio.run(_acknowledgements(broker, records))


async def _acknowledgements(broker: Broker, records: int) -> tuple[float, float]:
    load = LOADS["5k"]
    value = b"".join((",".join(map(str, ids(0, load.prompt))).encode(), first_request(load)))
    seconds: list[float] = []
    source = random.Random(0)
    async with LogWriter(broker.settings) as writer:

        async def write(number: int) -> None:
            begun = time.perf_counter()
            await writer.write_raw(DEAD_LETTERS, b"bench", value, {"number": str(number).encode()})
            seconds.append(time.perf_counter() - begun)

        async with asyncio.TaskGroup() as writes:
            for number in range(records):
                writes.create_task(write(number))
                await asyncio.sleep(source.expovariate(64))
    return quantile(seconds[5:], 0.5), quantile(seconds[5:], 0.99)


def memory_of_sessions(gateway: Gateway, *, sessions: int = 400) -> float:
    """KB of an open session after one call of 5k ids, history and continuity included.

    For a gateway that has served nothing else: later on freed memory is used again.
    """
    target = gateway_target(gateway)
    body = first_request(LOADS["5k"])
    run(closed_loop(target.port, target.requests(body, sessions // 4), 8), gateway.name)
    before = gateway.process.memory_mb()
    run(closed_loop(target.port, target.requests(body, sessions), 8), gateway.name)
    return 1024 * (gateway.process.memory_mb() - before) / sessions


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
