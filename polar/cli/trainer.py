"""`polar trainer`: train on the log as it grows, or offline on an archive."""

from pathlib import Path
from typing import Annotated, Literal

import typer

From = Annotated[
    Path | None, typer.Option("--from", help="Archive folder to train on offline (`polar archive`).")
]
Builder = Annotated[
    Literal["per_request", "prefix_merging"] | None,
    typer.Option(help="Build the rows of an archive anew with this builder."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result of offline training as JSON.")]


def trainer(folder: From = None, builder: Builder = None, as_json: Json = False) -> None:
    """Train a policy with GRPO. Settings come from the environment (POLAR_TRAINER_…)."""
    from polar.settings import LogSettings, TrainerSettings
    from polar.telemetry.logs import configure

    settings = TrainerSettings()
    configure("trainer")
    if folder is None:
        if builder is not None:
            raise typer.BadParameter("--builder needs --from: live batches are built by the packer")
        from polar.cli.services import Service

        Service("trainer", "polar.trainer.loop:serve", (LogSettings, TrainerSettings), "").command()()
        return
    from polar.cli.offline import train_on_archive

    train_on_archive(folder, settings, builder=builder, as_json=as_json)
