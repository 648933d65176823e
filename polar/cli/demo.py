"""`polar demo`: the whole loop on a real model, from nothing to a report."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from polar.cli.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from polar.demo.options import DemoOptions
    from polar.demo.pacing import Progress
    from polar.demo.run import DemoResult

Quick = Annotated[
    bool, typer.Option("--quick", help="A tiny random model and 2 steps: everything real, nothing learnt.")
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Go on where an earlier demo there stopped [default: a new one in polar-data/demo]."),
]
Seed = Annotated[int | None, typer.Option(help="Seed of the episodes [default: 2].")]
Steps = Annotated[int | None, typer.Option(help="Training steps at most [default: 10, quick: 2].", min=1)]
Staleness = Annotated[
    int | None, typer.Option(help="Policy steps that sampling may be behind training [default: 0].", min=0)
]
KafkaHome = Annotated[
    Path | None, typer.Option(help="Run this unpacked Apache Kafka (Java 17) as the broker.")
]
Bootstrap = Annotated[str | None, typer.Option(help="Use the Kafka brokers at this host:port list.")]
Reward = Annotated[
    Path | None, typer.Option(help="Score with this reward program (see examples/) instead.", exists=True)
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Empty --data-dir first.")]
TimeLimit = Annotated[float, typer.Option(help="Give up after so many seconds.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, in one last line on stdout.")]


def demo(
    quick: Quick = False,
    data_dir: DataDir = None,
    seed: Seed = None,
    steps: Steps = None,
    max_staleness: Staleness = None,
    kafka_home: KafkaHome = None,
    bootstrap_servers: Bootstrap = None,
    reward: Reward = None,
    fresh: Fresh = False,
    time_limit: TimeLimit = 1800.0,
    as_json: Json = False,
) -> int:
    """Watch a language model get better at a task inside an unmodified agent program.

    SmolLM2-135M looks up a price, calculates and answers, with an agent that knows only the
    openai SDK. Starts everything, trains, audits every token, writes a report and ends.
    """
    import asyncio

    from polar.demo.options import resolve_options
    from polar.demo.run import run_demo
    from polar.telemetry.logs import configure

    configure("demo", is_command=True)
    options = resolve_options(
        data_dir,
        fresh=fresh,
        quick=quick,
        seed=seed,
        steps=steps,
        max_staleness=max_staleness,
        kafka_home=kafka_home,
        bootstrap_servers=bootstrap_servers,
        reward=reward,
        time_limit_seconds=time_limit,
    )
    with _Display(options) as display:
        result = asyncio.run(
            _until_stopped(run_demo(options, notice=display.notice, on_progress=display.show))
        )
    if result is None:
        typer.echo(f"stopped; go on with: polar demo --data-dir {options.data_dir}", err=True)
        return Exit.FAILED
    _print_result(result, as_json=as_json)
    return Exit.OK


async def _until_stopped(work: "Coroutine[Any, Any, DemoResult]") -> "DemoResult | None":
    """The result, or None when a signal ended it; either way everything it started is gone."""
    import asyncio
    import signal

    task = asyncio.ensure_future(work)
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(sig, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None


class _Display:
    """Progress on stderr: notices as lines, batches as a bar where stderr is a terminal."""

    def __init__(self, options: "DemoOptions") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} batches"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("polar demo", total=options.plan.steps)
        self._shown: tuple[int, int | None] = (-2, None)
        self._console.print(f"polar demo in {options.data_dir}", highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def notice(self, text: str) -> None:
        """Say what is being done now."""
        self._bar.update(self._task, description=text)
        self._console.print(f"· {text}", highlight=False)

    def show(self, progress: "Progress") -> None:
        """One line for each batch trained or loaded."""
        now = (progress.trained_batch, progress.engine_batch)
        if now == self._shown:
            return
        self._shown = now
        rewards = ", ".join(f"{value:.2f}" for value in progress.rewards) or "none yet"
        self._bar.update(self._task, completed=progress.trained_batch + 1, total=progress.target_batches)
        loaded = "none" if progress.engine_batch is None else progress.engine_batch + 1
        self._console.print(
            f"· batches trained {progress.trained_batch + 1}, in the engine {loaded}, rewards {rewards}",
            highlight=False,
        )


def _print_result(result: "DemoResult", *, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="polar demo", show_header=False)
    for name, value in result.summary.items():
        table.add_row(name, str(value))
    Console(stderr=as_json).print(table)
    if as_json:
        sys.stdout.write(json.dumps(result.summary) + "\n")
