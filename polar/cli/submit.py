"""`polar submit`: hand a task to the rollout API."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

Task = Annotated[Path | None, typer.Argument(help="JSON file with a task, or - for stdin.")]
Command = Annotated[str | None, typer.Option(help="Harness command, run by sh -c, instead of a file.")]
Prompt = Annotated[str, typer.Option(help="Given to the harness as POLAR_PROMPT.")]
Evaluate = Annotated[
    str | None, typer.Option(help="Evaluator command: a JSON score on stdout, or its exit status.")
]
Samples = Annotated[int, typer.Option("-n", "--num-samples", help="Sessions of the group.", min=1)]
TaskId = Annotated[str | None, typer.Option(help="Id: submitting it twice is one task.")]
Api = Annotated[str | None, typer.Option(help="URL of the rollout API.")]
DataDir = Annotated[Path | None, typer.Option(help="Data directory of the deployment to ask.")]
Json = Annotated[bool, typer.Option("--json", help="Print the API's answer as JSON.")]


def submit(
    task: Task = None,
    command: Command = None,
    prompt: Prompt = "",
    evaluate: Evaluate = None,
    num_samples: Samples = 1,
    task_id: TaskId = None,
    api: Api = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Submit one task, from a file or from options; prints its id."""
    if (task is None) == (command is None):
        raise typer.BadParameter("give a task file (or -), or --command, and not both")
    from polar.cli.rollout_client import api_url, call_api

    body = _from_file(task) if task is not None else _from_options(command, prompt, evaluate, num_samples)
    if task_id is not None:
        body["task_id"] = task_id
    answer = call_api(api_url(api, data_dir), "POST", "/tasks", body)
    sys.stdout.write((json.dumps(answer) if as_json else str(answer["task_id"])) + "\n")


def _from_file(path: Path) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        value = json.loads(text)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{path}: a JSON object is expected")
    return value


def _from_options(command: str | None, prompt: str, evaluate: str | None, num_samples: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "harness": {"command": command},
        "prompt": prompt,
        "num_samples": num_samples,
    }
    if evaluate is not None:
        body["evaluator"] = {"kind": "command", "command": evaluate}
    return body
