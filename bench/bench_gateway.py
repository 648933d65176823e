"""What the gateway costs a call: CPU, latency, bytes on the log, beside no gateway and other gateways.

Recording, authentication and (with a tokenizer) continuity are on. The log is Apache Kafka where
KAFKA_HOME is set, else the embedded broker. The gateway has one processor for itself as far as the
machine is ours; engine, load and broker share another. CPU a call is of the gateway's whole process
tree and moves little on a busy machine; wall times do. `rps_per_core` is 1 s / CPU a call, and the
ratios to other gateways are ratios of that. All sessions send the same first request, as those of a
group do; `cpu_us_per_unseen_call` is one whose messages the gateway never saw. What could not be
measured is null, with its reason under `reasons`.
"""

import os
import shutil
import sys
import tempfile
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bench.gateway.deployment import Broker, Gateway, MockEngine, NoCompilerError
from bench.gateway.measures import (
    Target,
    added_latency,
    broker_acknowledgement,
    closed_loops,
    direct_target,
    gateway_target,
    memory_of_sessions,
    recorded_dialects,
    spliced,
    streaming,
    two_workers,
    unseen_calls,
)
from bench.gateway.peers import PEERS, start
from bench.gateway.processes import Process, stop_all
from bench.gateway.recorded import fixtures
from bench.gateway.session_log import record_cpu_us, session_on_the_log
from bench.gateway.workload import LOADS, SessionLoad
from bench.record import parser, record

_IN_FLIGHT = 32
_WAIT_MS = 500
_GAP_MS = 10
_STREAMS = 16
_DIALECTS = ("responses", "messages", "google")
_KEYS = (
    "cpu_us_per_call", "cpu_us_splice_5k", "cpu_us_splice_50k", "cpu_us_per_event", "broker",
    "broker_ack_p50_ms", "rps_per_core", "added_p50_ms_c32", "added_p99_ms_c32", "ttft_added_ms_p50",
    "litellm_ratio_rps", "rllm_ratio_rps", "vllm_router_ratio_rps", "workers2_cpu_ratio",
    "workers2_wall_ratio", "session_log_mb", "session_ids_mb", "record_cpu_us", "dialects",
)  # fmt: skip
Figures = dict[str, Any]
Result = TypeVar("Result")


class Report:
    """The figures so far; a measurement that fails leaves a reason."""

    def __init__(self, *, quiet: bool) -> None:
        self.figures: Figures = dict.fromkeys(_KEYS)
        self.reasons: dict[str, str] = {}
        self._quiet = quiet

    def attempt(self, what: str, keys: Sequence[str], work: Callable[[], Result]) -> Result | None:
        """Do one measurement; its keys stay null when it cannot be done."""
        if not self._quiet:
            print(f"{what} …", file=sys.stderr, flush=True)
        os.sync()  # gigabytes of log and spool that others wrote would go to the disk meanwhile
        try:
            return work()
        except (RuntimeError, OSError, LookupError) as error:
            self.lack(keys, f"{what}: {error}")
            return None

    def lack(self, keys: Sequence[str], reason: str) -> None:
        """These figures are not there."""
        self.reasons.update(dict.fromkeys(keys, reason))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and record; `argv` without the program's name."""
    made = parser("gateway", __doc__)
    made.add_argument("--rounds", type=int, default=3, help="rounds of each measurement; medians are shown")
    made.add_argument(
        "--calls", type=int, default=1000, help="calls of a round: the gateway's take a second then"
    )
    made.add_argument(
        "--peers",
        action=BooleanOptionalAction,
        default=None,
        help="other gateways too (default: with --json)",
    )
    made.add_argument(
        "--tokenizer", type=Path, default=_tokenizer(), help="folder with tokenizer and chat template"
    )
    made.add_argument(
        "--keep", action=BooleanOptionalAction, default=True, help="keep the result in bench/results"
    )
    options = made.parse_args(argv)
    with_peers = options.json if options.peers is None else options.peers
    report = Report(quiet=options.json)
    folder = Path(tempfile.mkdtemp(prefix="polar-bench-"))
    processors = os.sched_getaffinity(0)
    ours, others = _split(processors)
    os.sched_setaffinity(0, others)
    try:
        measure(report, folder, ours, others, options, with_peers=with_peers)
    except NoCompilerError as error:
        print(error, file=sys.stderr)
        return 3
    finally:
        stop_all()
        os.sched_setaffinity(0, processors)
        shutil.rmtree(folder, ignore_errors=True)
    record(
        "gateway", {**report.figures, "reasons": report.reasons}, only_json=options.json, keep=options.keep
    )
    return 0


def measure(
    report: Report, folder: Path, ours: set[int], others: set[int], options: Namespace, *, with_peers: bool
) -> None:
    """Everything, in a deployment of its own."""
    figures, rounds, calls = report.figures, options.rounds, options.calls
    tokenizer: Path | None = options.tokenizer
    figures["load_average"] = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors at the start"
    running: list[Process] = []
    engine = MockEngine(folder, others, tokenizer)
    running.append(engine.process)
    try:
        broker = Broker(folder)
        figures["broker"] = broker.kind
        try:
            gateways = []
            for name, where in (("gateway-0", ours), ("gateway-1", others)):
                gateways.append(Gateway(name, broker, engine, where, tokenizer))
                running.append(gateways[-1].process)
            takes_ids = gateways[0].state()["engines"]["engine-0"]["takes_ids"]
            figures["continuity"] = "on" if takes_ids else "off"
            figures["memory_kb_per_session"] = report.attempt(
                "memory of open sessions",
                ["memory_kb_per_session"],
                lambda: memory_of_sessions(gateways[1]),
            )
            target, direct = gateway_target(gateways[0]), direct_target(engine)
            peers = _peers(report, engine, folder, ours, running) if with_peers else {}
            if not with_peers:
                report.lack([f"{peer.name}_ratio_rps" for peer in PEERS], "not asked for (--peers)")
            _throughput(report, target, direct, peers, calls, rounds)
            for peer in list(running):
                if peer in {process for one in peers.values() for process in one.processes}:
                    peer.stop()
                    running.remove(peer)
            _unseen(report, target, calls, rounds)
            _sizes(report, target, direct, calls, rounds)
            _dialects(report, target, calls, rounds)
            if takes_ids:
                _splices(report, gateways[0], calls, rounds)
            else:
                reason = (
                    "needs --tokenizer" if tokenizer is None else "the engine was not taken to render alike"
                )
                report.lack(["cpu_us_splice_5k", "cpu_us_splice_50k"], reason)
            _latency(report, broker, target, direct, rounds)
            _workers(report, gateways, calls, rounds)
            _session(report, broker, gateways[0])
        finally:
            for process in reversed(running):
                process.stop()
            broker.stop()
    finally:
        engine.process.stop()
    figures["load_average_end"] = f"{os.getloadavg()[0]:.1f}"


def _peers(
    report: Report, engine: MockEngine, folder: Path, ours: set[int], running: list[Process]
) -> dict[str, Target]:
    found = {}
    for peer in PEERS:
        started = report.attempt(
            f"starting {peer.package}", [f"{peer.name}_ratio_rps"],
            lambda peer=peer: start(peer, engine, folder, ours),
        )  # fmt: skip
        if started is not None:
            running.append(started[0])
            found[peer.name] = started[1]
    return found


def _throughput(
    report: Report, target: Target, direct: Target, peers: dict[str, Target], calls: int, rounds: int
) -> None:
    """First calls of 42 KB and 5k ids, everybody in turn."""
    figures = report.figures
    fit = {
        name: peer
        for name, peer in peers.items()
        if report.attempt(f"trying {name}", [f"{name}_ratio_rps"], lambda peer=peer: _try(peer)) is not None
    }
    seen = report.attempt(
        "throughput", ["cpu_us_per_call", "rps_per_core"],
        lambda: closed_loops(
            [target, direct, *fit.values()], LOADS["5k"], calls=calls, in_flight=_IN_FLIGHT, rounds=rounds
        ),
    )  # fmt: skip
    if seen is None:
        return
    own = seen[target.name]
    figures["cpu_us_per_call"], figures["rps_per_core"] = own.cpu_us, own.rps_per_core
    for name in fit:
        figures[f"{name}_ratio_rps"] = own.rps_per_core / seen[name].rps_per_core
    figures["throughput_c32"] = {name: closed.figures() for name, closed in seen.items()}
    alone = report.attempt(
        "one call at a time", [],
        lambda: closed_loops([target, direct], LOADS["5k"], calls=calls // 2, in_flight=1, rounds=rounds),
    )  # fmt: skip
    if alone is not None:
        figures["throughput_c1"] = {name: closed.figures() for name, closed in alone.items()}


def _unseen(report: Report, target: Target, calls: int, rounds: int) -> None:
    """What a call costs whose messages are new to the gateway: those of `cpu_us_per_call` are not."""
    key = "cpu_us_per_unseen_call"
    report.figures[key] = report.attempt(
        "first calls with new messages", [key],
        lambda: unseen_calls(target, LOADS["5k"], calls=calls, in_flight=_IN_FLIGHT, rounds=rounds),
    )  # fmt: skip


def _try(peer: Target) -> object:
    """A few calls, so that one that cannot serve does not end the comparison."""
    return closed_loops([replace(peer, calls=4)], LOADS["5k"], calls=4, in_flight=2, rounds=1)


def _sizes(report: Report, target: Target, direct: Target, calls: int, rounds: int) -> None:
    sizes = report.figures["cpu_us_by_size"] = {}
    for name, share in (("20k", 3), ("50k", 8)):
        seen = report.attempt(
            f"first calls of {LOADS[name].request_kb} KB", [],
            lambda name=name, share=share: closed_loops(
                [target, direct], LOADS[name],
                calls=max(20, calls // share), in_flight=_IN_FLIGHT, rounds=rounds,
            ),
        )  # fmt: skip
        if seen is not None:
            sizes[name] = {each: closed.cpu_us for each, closed in seen.items()}


def _dialects(report: Report, target: Target, calls: int, rounds: int) -> None:
    """First requests of real programs where they are given, each beside a chat request of its size; else
    the same conversation from clients of each dialect. In the same rounds as chat."""
    folder = fixtures()
    if folder is not None:
        seen = report.attempt(
            "dialects, recorded", ["dialects"],
            lambda: recorded_dialects(target, folder, calls=calls, in_flight=_IN_FLIGHT, rounds=rounds),
        )  # fmt: skip
        if seen is not None:
            report.figures["dialects"] = seen
        return
    targets = [target, *(replace(target, name=name, dialect=name) for name in _DIALECTS)]
    seen = report.attempt(
        "dialects", ["dialects"],
        lambda: closed_loops(targets, LOADS["5k"], calls=calls, in_flight=_IN_FLIGHT, rounds=rounds),
    )  # fmt: skip
    if seen is not None:
        chat = seen[target.name].cpu_us
        report.figures["dialects"] = {"chat": {"cpu_us_per_call": chat, "ratio": 1.0}} | {
            name: {
                "request": "made up: POLAR_FIXTURES_DIR names no recorded ones",
                "cpu_us_per_call": seen[name].cpu_us,
                "ratio": seen[name].cpu_us / chat,
            }
            for name in _DIALECTS
        }


def _splices(report: Report, gateway: Gateway, calls: int, rounds: int) -> None:
    for name, share in (("5k", 2), ("50k", 10)):
        key = f"cpu_us_splice_{name}"
        report.figures[key] = report.attempt(
            f"continuing calls at {name}", [key],
            lambda name=name, share=share: spliced(
                gateway, LOADS[name], calls=max(20, calls // share), in_flight=_IN_FLIGHT, rounds=rounds
            ),
        )  # fmt: skip


def _latency(report: Report, broker: Broker, target: Target, direct: Target, rounds: int) -> None:
    figures = report.figures
    acknowledged = report.attempt(
        "acknowledgements", ["broker_ack_p50_ms"], lambda: broker_acknowledgement(broker)
    )
    if acknowledged is not None:
        figures["broker_ack_p50_ms"], figures["broker_ack_p99_ms"] = acknowledged
    for in_flight in (32, 128):
        keys = [f"added_p50_ms_c{in_flight}", f"added_p99_ms_c{in_flight}"]
        added = report.attempt(
            f"Poisson arrivals, {in_flight} in flight", keys,
            lambda in_flight=in_flight: added_latency(
                target, direct, in_flight=in_flight, wait_ms=_WAIT_MS, calls=8 * in_flight, rounds=rounds
            ),
        )  # fmt: skip
        if added is not None:
            figures[keys[0]], figures[keys[1]] = added["p50_ms"], added["p99_ms"]
    streamed = report.attempt(
        "streams", ["cpu_us_per_event", "ttft_added_ms_p50"],
        lambda: streaming(
            target, direct, streams=_STREAMS, gap_ms=_GAP_MS, calls=2 * _STREAMS, rounds=rounds
        ),
    )  # fmt: skip
    if streamed is not None:
        figures.update(streamed)


def _workers(report: Report, gateways: Sequence[Gateway], calls: int, rounds: int) -> None:
    keys = ["workers2_cpu_ratio", "workers2_wall_ratio"]
    ratios = report.attempt(
        "two workers", keys,
        lambda: two_workers(gateways[0], gateways[1], calls=calls, in_flight=_IN_FLIGHT, rounds=rounds),
    )  # fmt: skip
    if ratios is not None:
        report.figures[keys[0]], report.figures[keys[1]] = ratios["cpu_ratio"], ratios["wall_ratio"]


def _session(report: Report, broker: Broker, gateway: Gateway) -> None:
    figures = report.figures
    logged = report.attempt(
        "a session of 60 calls", ["session_log_mb", "session_ids_mb"],
        lambda: session_on_the_log(broker, gateway, SessionLoad()),
    )  # fmt: skip
    if logged is not None:
        figures["session_log_mb"], figures["session_ids_mb"] = logged["log_mb"], logged["ids_mb"]
        figures["session_last_prompt_tokens"] = logged["last_prompt_tokens"]
    figures["record_cpu_us"] = report.attempt(
        "ids of a session", ["record_cpu_us"], lambda: record_cpu_us(SessionLoad())
    )


def _split(processors: set[int]) -> tuple[set[int], set[int]]:
    """(the gateway's processor, those of everything else)."""
    first = min(processors)
    return {first}, (processors - {first}) or {first}


def _tokenizer() -> Path | None:
    named = os.environ.get("POLAR_GATEWAY_MODEL_PATH")
    return Path(named) if named else None


if __name__ == "__main__":
    sys.exit(main())
