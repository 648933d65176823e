"""`polar archive`: copy the topics of a run into a folder."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

To = Annotated[Path, typer.Option("--to", help="New folder for the archive.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Data directory of the running deployment [default: POLAR_DATA_DIR].")
]
Bootstrap = Annotated[str | None, typer.Option(help="Brokers to read from, host:port list.")]
Prefix = Annotated[str | None, typer.Option(help="First word of the topics' names.")]
Json = Annotated[bool, typer.Option("--json", help="Print counts as JSON.")]


def archive(
    to: To,
    data_dir: DataDir = None,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Copy every topic of a run into segment files with a manifest of digests and counts.

    The run may go on meanwhile: what is copied is complete up to a moment.
    """
    import asyncio

    from rich.console import Console

    from polar.archive.folder import archive_topics
    from polar.cli.source import log_settings
    from polar.supervision.kept import load_deployment
    from polar.telemetry.logs import configure

    configure("archive", is_command=True)
    settings = log_settings(data_dir, bootstrap_servers, prefix)
    console = Console(stderr=True)

    def told(topic: str, records: int) -> None:
        console.print(f"· {settings.topic_prefix}.{topic}: {records} records", highlight=False)

    kept = load_deployment((data_dir or settings.data_dir).absolute())
    manifest = asyncio.run(archive_topics(settings, to, told=told, run_settings=kept.settings))
    if as_json:
        result = {"folder": str(to), "records": manifest.records, "topics": manifest.counts()}
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        console.print(f"{manifest.records} records in {to}", highlight=False)
