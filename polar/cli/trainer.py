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
    Literal["per_request", "prefix_merging", "prefix_tree"] | None,
    typer.Option(help="Build the rows of an archive anew with this builder."),
]
Export = Annotated[
    Path | None, typer.Option(help="Write the weights of offline training to this new folder.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the steps of offline training as JSON.")]

COMPARED = ("loss", "grad_norm")
"""On policy the loss itself is near 0, whatever was sampled: the gradient says more."""
TOLERANCE = 1e-5
"""Relative; equal rows on the same machine usually give equal bits."""


def trainer(
    folder: From = None, builder: Builder = None, export: Export = None, as_json: Json = False
) -> int:
    """Train a policy with GRPO. Settings come from the environment (POLAR_TRAINER_…).

    With --from the archive's own settings are the defaults, and losses and gradient norms are
    compared with the live run's: exit status 1 when they differ (only printed with --builder).
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
    builder: Literal["per_request", "prefix_merging", "prefix_tree"] | None,
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
    live = {policy.batch_number: policy.metrics for policy in run.policies if "loss" in policy.metrics}
    lines = [_beside(step, live.get(int(step["batch_number"]), {})) for step in steps]
    equal = all(line["equal"] for line in lines)
    _print(lines, equal=equal, as_json=as_json)
    return Exit.OK if equal or builder is not None else Exit.FAILED


def _beside(step: dict[str, float], live: "Mapping[str, float]") -> dict[str, Any]:
    """A step's metrics with those of the live run; `equal` compares what says what was learnt."""
    return {
        **step,
        **{f"live_{name}": live.get(name) for name in COMPARED},
        "equal": all(
            math.isclose(step[name], live[name], rel_tol=TOLERANCE, abs_tol=1e-6)
            for name in COMPARED
            if name in live and name in step
        ),
    }


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

    table = Table("batch", "trained tokens", "loss", "live", "gradient norm", "live", "equal")
    for line in lines:
        shown = [line.get(name) for name in ("loss", "live_loss", "grad_norm", "live_grad_norm")]
        table.add_row(
            str(int(line["batch_number"])),
            str(int(line["trained_tokens"])),
            *("" if value is None else f"{value:.6g}" for value in shown),
            "yes" if line["equal"] else "no",
        )
    Console().print(table)
