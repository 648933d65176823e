"""`polar trajectories`: look at token trees, and at why histories broke."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polar.cli.exits import Exit, MissingError, exiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polar.core.drift import Decode
    from polar.core.stage import LogRecord
    from schemas.trajectories import Trajectory

Id = Annotated[str, typer.Argument(metavar="ID", help="A session, a trajectory or a group (a task).")]
From = Annotated[
    Path | None, typer.Option("--from", help="Archive folder; left out: the log of a running deployment.")
]
DataDir = Annotated[
    Path | None, typer.Option(help="Data directory of the running deployment [default: POLAR_DATA_DIR].")
]
Bootstrap = Annotated[str | None, typer.Option(help="Brokers, host:port list.")]
Prefix = Annotated[str | None, typer.Option(help="First word of the topics' names.")]
Restitch = Annotated[
    bool, typer.Option("--restitch", help="Make the trees anew from the recorded calls, with today's code.")
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(help="Folder with a tokenizer.json, for the texts of splits; implies --restitch."),
]
Text = Annotated[int, typer.Option(help="Characters of each message that are shown; 0: none.", min=0)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

app = typer.Typer(help="Look at token trees, and at why histories broke.", no_args_is_help=True)


def show(
    wanted: Id,
    archive: From = None,
    data_dir: DataDir = None,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
    restitch: Restitch = False,
    tokenizer: Tokenizer = None,
    text: Text = 60,
    as_json: Json = False,
) -> int:
    """Print the token tree of a session, or of every session of a group.

    Exit status 3 when there is no such trajectory.
    """
    from polar.cli.trajectory_tree import as_value, print_tree

    records = _records(archive, data_dir, bootstrap_servers, prefix)
    chosen = _chosen(wanted, _trajectories(records, tokenizer, anew=restitch))
    if as_json:
        _print_json({"trajectories": [as_value(each) for each in chosen]})
    else:
        for each in chosen:
            print_tree(each, text)
    return Exit.OK


def causes(
    archive: From = None,
    data_dir: DataDir = None,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
    restitch: Restitch = False,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> int:
    """Count, by harness and model, the calls whose prompt did not extend an earlier call, by cause."""
    from dataclasses import asdict

    from polar.core.cause_counts import count_causes
    from schemas.calls import CallRecord

    records = _records(archive, data_dir, bootstrap_servers, prefix)
    calls = [record.event for record in records if isinstance(record.event, CallRecord)]
    counts = count_causes(calls, _trajectories(records, tokenizer, anew=restitch))
    if as_json:
        _print_json({"causes": [{**asdict(each), "causes": dict(each.causes)} for each in counts]})
    else:
        from polar.cli.trajectory_tree import print_causes

        print_causes(counts)
    return Exit.OK


app.command()(exiting(show))
app.command()(exiting(causes))


def _records(
    archive: Path | None, data_dir: Path | None, bootstrap_servers: str | None, prefix: str | None
) -> "list[LogRecord]":
    """Calls and trajectories of a run."""
    from polar.telemetry.logs import configure
    from schemas.topics import CALLS, TRAJECTORIES

    configure("trajectories", is_command=True)
    if archive is not None:
        if data_dir or bootstrap_servers or prefix:
            raise typer.BadParameter("give --from, or a deployment, and not both")
        from polar.archive.folder import read_events

        return read_events(archive, CALLS, TRAJECTORIES)
    import asyncio

    from polar.cli.source import log_settings, read_topics

    return asyncio.run(read_topics(log_settings(data_dir, bootstrap_servers, prefix), CALLS, TRAJECTORIES))


def _decoder(folder: Path) -> "Decode":
    """From ids to text, special tokens included."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingError(f"--tokenizer: {path} is missing")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    size = tokenizer.get_vocab_size()

    def decode(ids: "Sequence[int]") -> str:
        return str(tokenizer.decode([each for each in ids if 0 <= each < size], skip_special_tokens=False))

    return decode


def _trajectories(records: "list[LogRecord]", tokenizer: Path | None, *, anew: bool) -> "list[Trajectory]":
    """The recorded trajectories, the first of each id, or those that today's stitcher makes of the calls."""
    from polar.core.replaying import restitch
    from schemas.trajectories import Trajectory

    if anew or tokenizer is not None:
        decode = _decoder(tokenizer) if tokenizer is not None else None
        return list(restitch(records, decode).values())
    there: dict[str, Trajectory] = {}
    for record in records:
        if isinstance(record.event, Trajectory):
            there.setdefault(record.event.trajectory_id, record.event)
    return list(there.values())


def _chosen(wanted: str, there: "list[Trajectory]") -> "list[Trajectory]":
    """Those of a session, trajectory or group id, in order of their ids. Raises MissingError."""
    chosen = [each for each in there if wanted in (each.trajectory_id, each.session_id, each.group_id)]
    if not chosen:
        some = ", ".join(sorted(each.session_id for each in there)[:3])
        known = f"{len(there)} are there, such as {some}" if there else "none is there yet"
        raise MissingError(f"no trajectory of a session, trajectory or group {wanted!r}: {known}")
    return sorted(chosen, key=lambda each: each.session_id)


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
