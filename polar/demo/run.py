"""The whole demo: a deployment, the driver, the ledger, the report.

Invariant: it ends by itself within its time limit, and nothing it started is left, however it
ends. Killed with -9 and started again on the same data directory it goes on: everything it needs
to know is on the log and in the witnesses' files.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from polar.demo.driver import drive
from polar.demo.ledger import audit, summarize
from polar.demo.options import DemoOptions
from polar.demo.pacing import Progress
from polar.demo.preparing import prepare_model
from polar.demo.recorded import TOPICS_READ, Recorded, collect
from polar.demo.report import write_report
from polar.demo.witness import read_answers, read_journal
from polar.errors import PolarError
from polar.kafka.reader import read_all
from polar.settings import LogSettings
from polar.supervision.kept import load_deployment, log_settings_of
from polar.supervision.lock import DataDirLock, lock_owner
from polar.supervision.ports import load_ports
from polar.supervision.processes import sweep
from polar.supervision.supervisor import ServiceSpec, Supervisor
from polar.supervision.warden import start_warden

Notice = Callable[[str], None]


class DemoFailedError(PolarError):
    """The demo did not reach its end; the message says where it stood."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Where everything is."""

    summary: dict[str, object]
    report: Path


async def run_demo(
    options: DemoOptions, *, notice: Notice, on_progress: Callable[[Progress], None]
) -> DemoResult:
    """Run to the end. Raises DemoFailedError, or an error of the deployment."""
    started = time.monotonic()
    data_dir = options.data_dir
    with DataDirLock(data_dir, "demo") as lock:
        deployment = f"{data_dir}#demo"
        sweep(deployment)
        warden = start_warden(deployment, lock=lock)
        try:
            notice("preparing the model")
            model = await asyncio.to_thread(prepare_model, "tiny" if options.quick else "smollm2")
            notice("starting broker, engine and services (about a minute)")
            return await _run(
                options, model, deployment, started=started, notice=notice, on_progress=on_progress
            )
        finally:
            if warden.stdin is not None:
                warden.stdin.close()
            await asyncio.to_thread(warden.wait)


async def _run(
    options: DemoOptions,
    model: Path,
    deployment: str,
    *,
    started: float,
    notice: Notice,
    on_progress: Callable[[Progress], None],
) -> DemoResult:
    data_dir = options.data_dir
    stop, ready = asyncio.Event(), asyncio.Event()
    supervisor = Supervisor(
        _children(options, model),
        deployment=deployment,
        state_file=data_dir / "demo.json",
        log_dir=data_dir / "logs",
    )
    running = asyncio.create_task(supervisor.run(stop, on_ready=ready.set))
    last: list[Progress] = []

    def remember(progress: Progress) -> None:
        last[:] = [progress]
        on_progress(progress)

    async def work() -> DemoResult:
        await ready.wait()
        settings = log_settings_of(data_dir)
        api_url = f"http://127.0.0.1:{load_ports(data_dir)['scheduler']}"
        notice("running")
        await drive(
            settings,
            options.plan,
            api_url=api_url,
            kind=options.kind,
            journal=data_dir / "audit" / "journal.jsonl",
            reward_program=options.reward is not None,
            on_progress=remember,
        )
        notice("auditing")
        return await _conclude(settings, data_dir, model, seconds=time.monotonic() - started)

    working = asyncio.create_task(work())
    left = options.time_limit_seconds - (time.monotonic() - started)
    try:
        await asyncio.wait({working, running}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        if not working.done():
            raise DemoFailedError(_where_it_stood(options, last))
        return working.result()
    finally:
        working.cancel()
        stop.set()
        await asyncio.gather(working, running, return_exceptions=True)


def _children(options: DemoOptions, model: Path) -> list[ServiceSpec]:
    """`polar up`, and the reward program where one was asked for."""
    data_dir = options.data_dir
    argv = [sys.executable, "-m", "polar.cli.main", "up", "--data-dir", str(data_dir), "--model", str(model)]
    argv += ["--free-ports", "--relay"]
    if options.kafka_home is not None:
        argv += ["--kafka-home", str(options.kafka_home)]
    if options.bootstrap_servers is not None:
        argv += ["--bootstrap-servers", options.bootstrap_servers]

    async def is_up() -> bool:
        owner = lock_owner(data_dir, "up")
        try:
            state = json.loads((data_dir / "up.json").read_text())
        except (OSError, ValueError):
            return False
        return bool(state["ready"]) and state["pid"] == owner

    services = [
        ServiceSpec(
            "up",
            tuple(argv),
            _settings(options),
            is_ready=is_up,
            # It has tried for itself, so a start that failed has failed.
            fatal_statuses=frozenset({1, 2, 3}),
            stop_seconds=60.0,
        ),
    ]
    if options.reward is not None:
        program = (sys.executable, str(options.reward.absolute()))
        services.append(
            ServiceSpec(
                "reward",
                program,
                {},
                needs=("up",),
                late_env=lambda: load_deployment(data_dir).settings,
            )
        )
    return services


def _settings(options: DemoOptions) -> dict[str, str]:
    """Settings of the services that are the demo's own."""
    plan = options.plan
    return {
        # Runs on a shared broker must not see one another.
        "POLAR_TOPIC_PREFIX": options.topic_prefix,
        "POLAR_PACKER_GROUPS_PER_BATCH": str(plan.groups_per_batch),
        "POLAR_PACKER_ROW_TOKENS": "2048",
        "POLAR_NODE_MAX_RUNNING": "8",
        "POLAR_NODE_MAX_READY": "8",
        "POLAR_SCHEDULER_READY_TARGET": "4",
        "POLAR_ENGINE_MAX_MODEL_LEN": "1024",
        "POLAR_ENGINE_DTYPE": "float32",
        "POLAR_TRAINER_DTYPE": "float32",
        "POLAR_TRAINER_LEARNING_RATE": "1e-3" if options.quick else "2e-5",
    }


async def _conclude(settings: LogSettings, data_dir: Path, model: Path, *, seconds: float) -> DemoResult:
    run = await read_run(settings)
    answers = read_answers(data_dir / "audit" / "answers.jsonl")
    account = audit(run, answers, read_journal(data_dir / "audit" / "journal.jsonl"))
    summary: dict[str, object] = {**summarize(run, account, seconds=seconds), "data_dir": str(data_dir)}
    report = data_dir / "report.html"
    write_report(report, run, summary, model=model)
    summary["report"] = str(report)
    (data_dir / "audit" / "account.json").write_text(json.dumps(asdict(account), indent=1) + "\n")
    (data_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return DemoResult(summary, report)


async def read_run(settings: LogSettings) -> Recorded:
    """All records of a run up to now."""
    return collect([record.event for topic in TOPICS_READ for record in await read_all(settings, topic)])


def _where_it_stood(options: DemoOptions, last: list[Progress]) -> str:
    limit = f"the demo did not end within {options.time_limit_seconds:.0f} s"
    logs = f"see {options.data_dir / 'logs'}; start it again with --data-dir {options.data_dir} to go on"
    if not last:
        return f"{limit}: the deployment never became ready; {logs}"
    progress = last[0]
    return (
        f"{limit}: {len(progress.submitted)} tasks, {len(progress.manifests)} batches, last trained "
        f"{progress.trained_batch}, in the engine {progress.engine_batch}; {logs}"
    )
