"""`polar status`: what a deployment is doing, or how a task stands."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from polar.cli.exits import Exit

TaskId = Annotated[str | None, typer.Argument(help="A task; without it, the deployment.")]
Api = Annotated[str | None, typer.Option(help="URL of the rollout API.")]
DataDir = Annotated[Path | None, typer.Option(help="Data directory of the deployment.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(task_id: TaskId = None, api: Api = None, data_dir: DataDir = None, as_json: Json = False) -> int:
    """Show the services of `polar up` and how far the log has got, or one task.

    Exit status 1 when the deployment is not up.
    """
    if task_id is not None:
        from polar.cli.rollout_client import api_url, call_api

        _print(call_api(api_url(api, data_dir), "GET", f"/tasks/{task_id}"), as_json=as_json)
        return Exit.OK
    from polar.settings import LogSettings

    value = _deployment((data_dir or LogSettings().data_dir).absolute())
    if as_json:
        _print(value, as_json=True)
    else:
        _print_deployment(value)
    return Exit.OK if value["running"] else Exit.FAILED


def _print(value: Any, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(value) + "\n")
        return
    from rich.console import Console

    Console().print_json(data=value)


def _deployment(data_dir: Path) -> dict[str, Any]:
    """State of the services and ends of the topics."""
    import asyncio

    from polar.errors import PolarError
    from polar.supervision.lock import lock_owner

    owner = lock_owner(data_dir, "up")
    try:
        state = json.loads((data_dir / "up.json").read_text())
    except (OSError, ValueError):
        state = {"services": {}, "ready": False}
    value: dict[str, Any] = {
        "data_dir": str(data_dir),
        "running": owner is not None,
        "ready": owner is not None and state["ready"],
        "pid": owner,
        "services": state["services"],
        "records": {},
    }
    if value["ready"]:
        try:
            value["records"] = asyncio.run(_ends(data_dir))
        except PolarError as error:
            value["error"] = str(error)
    return value


async def _ends(data_dir: Path) -> dict[str, int]:
    """Records ever written a topic."""
    from polar.kafka.reader import end_offsets
    from polar.supervision.kept import log_settings_of
    from schemas.topics import TOPICS

    settings = log_settings_of(data_dir)
    return {topic.suffix: sum((await end_offsets(settings, topic)).values()) for topic in TOPICS}


def _print_deployment(value: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    state = "ready" if value["ready"] else "starting" if value["running"] else "not running"
    console.print(f"{value['data_dir']}: {state}", highlight=False)
    table = Table("service", "status", "pid", "restarts")
    for name, service in value["services"].items():
        # Of a deployment that was killed, only the last words are left.
        status_now = service["status"] if value["running"] else f"gone (was {service['status']})"
        table.add_row(name, status_now, str(service["pid"] or ""), str(service["restarts"]))
    console.print(table)
    if value["records"]:
        counts = ", ".join(
            f"{topic.removesuffix('.v1')} {count}" for topic, count in value["records"].items()
        )
        console.print(f"records: {counts}", highlight=False)
