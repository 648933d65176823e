"""`polar trainer`: train on the log as it grows, or offline on an archive."""

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from polar.cli.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polar.settings import TrainerSettings

From = Annotated[
    Path | None, typer.Option("--from", help="Archive folder to train on offline (`polar archive`).")
]
Builder = Annotated[
    Literal["per_request", "prefix_merging"] | None,
    typer.Option(help="Build the rows of an archive anew with this builder."),
]
Export = Annotated[
    Path | None, typer.Option(help="Write the weights of offline training to this new folder.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the steps of offline training as JSON.")]

LOSS_TOLERANCE = 1e-5
"""Relative; equal batches on the same machine usually give equal bits."""


def trainer(
    folder: From = None, builder: Builder = None, export: Export = None, as_json: Json = False
) -> int:
    """Train a policy with GRPO. Settings come from the environment (POLAR_TRAINER_…).

    With --from the archive's own settings are the defaults, and the losses are compared with the
    live run's: exit status 1 when they differ (with --builder they are only printed).
    """
    from polar.settings import LogSettings, TrainerSettings
    from polar.telemetry.logs import configure

    if folder is None:
        if builder is not None or export is not None:
            raise typer.BadParameter("--builder and --export need --from")
        from polar.cli.services import Service

        Service("trainer", "polar.trainer.loop:serve", (LogSettings, TrainerSettings), "").command()()
        return Exit.OK
    configure("trainer")
    return _train_on_archive(folder, builder=builder, export_to=export, as_json=as_json)


def _train_on_archive(
    folder: Path,
    *,
    builder: Literal["per_request", "prefix_merging"] | None,
    export_to: Path | None,
    as_json: bool,
) -> int:
    from polar.archive.folder import open_archive
    from polar.cli.replay import read_folder
    from polar.core.replaying import ReplayOptions, replay
    from polar.errors import SettingsError
    from polar.trainer.offline import train_offline

    settings = _settings_of(open_archive(folder).run_settings)
    run = replay(read_folder(folder), ReplayOptions(builder=builder))
    if builder is None and run.mismatches:
        raise SettingsError(f"{folder}: {len(run.mismatches)} values cannot be rebuilt; see `polar replay`")
    steps = train_offline(
        ((batch.manifest, batch.rows) for batch in run.batches), settings, export_to=export_to
    )
    live = {
        policy.batch_number: policy.metrics["loss"] for policy in run.policies if "loss" in policy.metrics
    }
    lines: list[dict[str, Any]] = [
        {**step, "live_loss": live.get(int(step["batch_number"]))} for step in steps
    ]
    differ = [
        line
        for line in lines
        if line["live_loss"] is not None
        and not math.isclose(line["loss"], line["live_loss"], rel_tol=LOSS_TOLERANCE, abs_tol=1e-7)
    ]
    _print(lines, equal=not differ, as_json=as_json)
    return Exit.FAILED if differ and builder is None else Exit.OK


def _settings_of(kept: "Mapping[str, str]") -> "TrainerSettings":
    """Trainer settings: the environment, then those of the archived run, then the defaults."""
    import os

    from polar.settings import TrainerSettings

    prefix = str(TrainerSettings.model_config["env_prefix"])
    names = {field: f"{prefix}{field}".upper() for field in TrainerSettings.model_fields}
    values: dict[str, Any] = {
        field: kept[name] for field, name in names.items() if name in kept and name not in os.environ
    }
    return TrainerSettings(**values)


def _print(lines: list[dict[str, Any]], *, equal: bool, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"equal": equal, "steps": lines}) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("batch", "loss", "loss of the live run", "trained tokens")
    for line in lines:
        table.add_row(
            str(int(line["batch_number"])),
            f"{line['loss']:.6f}",
            "" if line["live_loss"] is None else f"{line['live_loss']:.6f}",
            str(int(line["trained_tokens"])),
        )
    Console().print(table)
