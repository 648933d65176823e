"""`polar replay`: rebuild trajectories, groups and batches by the recorded decisions, and compare."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from polar.cli.exits import Exit

if TYPE_CHECKING:
    from polar.core.replaying import Replay
    from polar.core.stage import LogRecord
    from polar.settings import LogSettings
    from schemas.topics import TopicSpec

Folder = Annotated[Path | None, typer.Argument(help="Archive folder; leave out with --topics.")]
Topics = Annotated[str | None, typer.Option(help="Replay the topics with this prefix instead of a folder.")]
DataDir = Annotated[Path | None, typer.Option(help="Data directory of the deployment with the broker.")]
Bootstrap = Annotated[str | None, typer.Option(help="Brokers, host:port list.")]
ToPrefix = Annotated[
    str | None, typer.Option(help="Copy the archive into new topics with this prefix, and replay those.")
]
Partitions = Annotated[int | None, typer.Option(help="Partitions of the new topics keyed by group.", min=1)]
SessionPartitions = Annotated[
    int | None, typer.Option(help="Partitions of the new topics keyed by session.", min=1)
]
Evaluator = Annotated[
    str | None,
    typer.Option(help="Score with this evaluator's rewards only, not the counted ones."),
]
Builder = Annotated[
    Literal["per_request", "prefix_merging", "prefix_tree"] | None,
    typer.Option(help="Pack rows with this builder instead."),
]
RowTokens = Annotated[
    int | None, typer.Option(help="Token budget of a row instead of the recorded one.", min=1)
]
Estimator = Annotated[
    Literal["group_mean_std", "group_mean", "leave_one_out", "leave_one_out_std", "max_rl"] | None,
    typer.Option(help="Turn scores into advantages this way instead of the recorded one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print digests and differences as JSON.")]


def replay(
    folder: Folder = None,
    topics: Topics = None,
    data_dir: DataDir = None,
    bootstrap_servers: Bootstrap = None,
    to_prefix: ToPrefix = None,
    group_partitions: Partitions = None,
    session_partitions: SessionPartitions = None,
    evaluator: Evaluator = None,
    builder: Builder = None,
    row_tokens: RowTokens = None,
    estimator: Estimator = None,
    as_json: Json = False,
) -> int:
    """Rebuild a run from its log and compare digests with what the live run recorded.

    Exit status 1 when something differs. With --evaluator, --estimator, --builder or --row-tokens
    the result is meant to differ from there on; then only trajectories must be equal.
    """
    if (folder is None) == (topics is None):
        raise typer.BadParameter("give an archive folder, or --topics PREFIX, and not both")
    if to_prefix is not None and folder is None:
        raise typer.BadParameter("--to-prefix copies an archive: give its folder")
    import asyncio

    from polar.cli.source import log_settings
    from polar.core.replaying import ReplayOptions
    from polar.core.replaying import replay as rebuild
    from polar.telemetry.logs import configure
    from schemas.rewards import Reward

    configure("replay", is_command=True)
    if folder is not None and to_prefix is None:
        records = read_folder(folder)
    else:
        settings = log_settings(data_dir, bootstrap_servers, to_prefix or topics)
        if folder is not None:
            settings = _with_partitions(settings, group_partitions, session_partitions)
            asyncio.run(_copy(folder, settings))
        records = asyncio.run(_from_topics(settings))
    rewards = None
    if evaluator is not None:
        rewards = tuple(
            record.event
            for record in records
            if isinstance(record.event, Reward) and record.event.evaluator == evaluator
        )
        if not rewards:
            raise typer.BadParameter(f"--evaluator {evaluator}: no reward of that name is on the log")
    options = ReplayOptions(rewards=rewards, builder=builder, row_tokens=row_tokens, estimator=estimator)
    result = rebuild(records, options)
    return _report(result, faithful=options.is_faithful, records=records, as_json=as_json)


def read_folder(folder: Path) -> "list[LogRecord]":
    """The records of an archive that a replay needs."""
    from polar.archive.folder import read_events

    return read_events(folder, *_needed())


async def _from_topics(settings: "LogSettings") -> "list[LogRecord]":
    from polar.cli.source import read_topics

    return await read_topics(settings, *_needed())


def _needed() -> "tuple[TopicSpec, ...]":
    from schemas.topics import BATCHES, CALLS, GROUP_EVENTS, GROUPS, POLICIES, REWARDS, TRAJECTORIES

    return (CALLS, REWARDS, GROUP_EVENTS, TRAJECTORIES, GROUPS, BATCHES, POLICIES)


def _with_partitions(settings: "LogSettings", groups: int | None, sessions: int | None) -> "LogSettings":
    changes = {"group_partitions": groups, "session_partitions": sessions}
    return settings.model_copy(update={name: value for name, value in changes.items() if value is not None})


async def _copy(folder: Path, settings: "LogSettings") -> None:
    from rich.console import Console

    from polar.archive.copying import copy_into_topics

    console = Console(stderr=True)

    def told(topic: str, records: int) -> None:
        console.print(f"· {settings.topic_prefix}.{topic}: {records} records written", highlight=False)

    await copy_into_topics(folder, settings, told=told)


def _report(result: "Replay", *, faithful: bool, records: "list[LogRecord]", as_json: bool) -> int:
    from polar.archive.digests import recorded_digests

    wrong = [item for item in result.mismatches if faithful or item.kind == "trajectory"]
    value = {
        "equal": not wrong,
        "faithful": faithful,
        "digests": result.digests(),
        "recorded": recorded_digests(record.event for record in records),
        "compared": result.compared,
        "rebuilt": {
            "trajectories": len(result.trajectories),
            "groups": len(result.groups),
            "batches": len(result.batches),
        },
        "mismatches": [
            {
                "kind": item.kind,
                "id": item.id,
                "recorded": item.recorded,
                "replayed": item.replayed,
                "detail": item.detail,
            }
            for item in result.mismatches
        ],
    }
    if as_json:
        sys.stdout.write(json.dumps(value) + "\n")
    else:
        _print(value)
    return Exit.FAILED if wrong else Exit.OK


def _print(value: dict[str, object]) -> None:
    from typing import cast

    from rich.console import Console
    from rich.table import Table

    table = Table("", "rebuilt")
    for column in ("digest", "live run"):
        table.add_column(column, overflow="fold")
    digests = cast("dict[str, str]", value["digests"])
    recorded = cast("dict[str, str]", value["recorded"])
    rebuilt = cast("dict[str, int]", value["rebuilt"])
    for kind, digest in digests.items():
        table.add_row(
            kind, str(rebuilt[kind]), digest, "equal" if recorded[kind] == digest else recorded[kind]
        )
    console = Console()
    console.print(table)
    for item in cast("list[dict[str, str]]", value["mismatches"])[:20]:
        console.print(f"differs: {item['kind']} {item['id']} {item['detail']}", highlight=False)
