"""`polar capture`: run any agent command and keep its model calls, without a broker and without training."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polar.cli.exits import MissingError

if TYPE_CHECKING:
    from polar.archive.folder import ArchiveManifest
    from schemas.calls import CallRecord

Command = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND…", help="The agent program and its arguments.")
]
UpstreamUrl = Annotated[
    str, typer.Option("--upstream", help="Server with OpenAI's chat completions, e.g. http://127.0.0.1:8600.")
]
To = Annotated[Path, typer.Option("--to", help="New folder for the records: an archive.")]
Model = Annotated[str, typer.Option(help="Model's name at the upstream [default: the only one there].")]
KeyEnv = Annotated[str, typer.Option(help="Environment variable with the key that the upstream wants.")]
AsAsked = Annotated[
    bool,
    typer.Option("--as-asked", help="Sample as the agent asks. Its calls cannot be trained then."),
]
Temperature = Annotated[float, typer.Option(help="Of every call, where calls can be trained.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON line when the command has ended.")]


def capture(
    command: Command,
    upstream: UpstreamUrl,
    to: To,
    model: Model = "",
    key_env: KeyEnv = "OPENAI_API_KEY",
    as_asked: AsAsked = False,
    temperature: Temperature = 1.0,
    as_json: Json = False,
) -> int:
    """Run an agent behind a gateway of its own and keep every model call, for looking at and for SFT.

    Base URLs and keys of OpenAI's, Anthropic's and Google's clients are set in its environment.
    The upstream may be any server with chat completions; where it does not prove its token ids,
    the records say that they cannot be trained. Ends with the command's exit status.
    """
    import asyncio
    import os

    from polar.capture.session import capture as run
    from polar.capture.upstream import look_at
    from polar.errors import EngineError
    from polar.telemetry.logs import configure

    configure("capture", is_command=True)
    api_key = os.environ.get(key_env, "")
    try:
        server = asyncio.run(look_at(upstream, model, api_key))
    except EngineError as error:
        raise MissingError(f"{error}; --upstream names no server that can be used") from error
    if server.why_untrainable:
        typer.echo(f"polar: calls are kept and cannot be trained: {server.why_untrainable}", err=True)
    trainable = server.kind == "vllm" and not as_asked
    try:
        status, manifest = asyncio.run(
            run(command, server, to, api_key=api_key, trainable=trainable, temperature=temperature)
        )
    except FileNotFoundError as error:
        raise MissingError(f"{command[0]}: no such program") from error
    _report(to, manifest, status, as_json=as_json)
    return status


def _report(folder: Path, manifest: "ArchiveManifest", status: int, *, as_json: bool) -> None:
    from polar.archive.folder import read_events
    from schemas.calls import CallRecord
    from schemas.topics import CALLS

    calls = [r.event for r in read_events(folder, CALLS) if isinstance(r.event, CallRecord)]
    if as_json:
        result = {
            "folder": str(folder),
            "exit_status": status,
            "session_id": calls[0].session_id if calls else None,
            "records": manifest.records,
            "calls": [_as_value(call) for call in calls],
        }
        sys.stdout.write(json.dumps(result) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("call", "dialect", "sampled", "finish", "delivery", "not trained for", "answer")
    for call in calls:
        value = _as_value(call)
        table.add_row(
            str(value["seq"]), value["dialect"], str(value["sampled_tokens"]), value["finish_reason"],
            value["delivery"], value["untrainable"] or "", value["answer"][:60],
        )  # fmt: skip
    console = Console(stderr=True)
    console.print(table)
    console.print(f"{len(calls)} calls in {folder}", highlight=False)
    if calls:
        shown = f"polar trajectories show {calls[0].session_id} --from {folder} --restitch"
        console.print(f"their tree: {shown}", highlight=False)


def _as_value(call: "CallRecord") -> dict[str, Any]:
    """What a person wants to know of a call first."""
    names = [tool["function"]["name"] for tool in call.answer.get("tool_calls") or ()]
    return {
        "seq": call.seq,
        "dialect": call.dialect,
        "sampled_tokens": len(call.sampled_ids) or (call.usage.completion_tokens if call.usage else 0),
        "finish_reason": call.finish_reason or "",
        "delivery": call.delivery.value,
        "untrainable": call.untrainable,
        "answer": " ".join(filter(None, (_text_of(call.answer), *(f"[{name}]" for name in names)))),
    }


def _text_of(answer: dict[str, Any]) -> str:
    content = answer.get("content")
    return " ".join(content.split()) if isinstance(content, str) else ""
