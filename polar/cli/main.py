"""Entry point of `polar`. Importing this module must stay cheap: commands import what they need."""

import sys
from collections.abc import Callable

import typer
from pydantic import ValidationError

from polar.cli import (
    archive,
    bench,
    capture,
    demo,
    doctor,
    replay,
    services,
    status,
    submit,
    topics,
    trainer,
    trajectories,
    up,
)
from polar.cli.exits import exiting, explain, status_of
from polar.errors import PolarError

app = typer.Typer(
    name="polar",
    help="Reinforcement learning on black-box agent harnesses over a durable log.",
    epilog="Exit status: 0 done, 1 failed, 2 wrong usage, 3 something that is needed is missing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PEOPLE = "For people"
_SERVICES = "Services (settings come from the environment)"

_FOR_PEOPLE: tuple[Callable[..., int | None], ...] = (
    up.up, demo.demo, submit.submit, status.status, archive.archive, replay.replay, capture.capture,
    doctor.doctor,
)  # fmt: skip
for _command in _FOR_PEOPLE:
    app.command(rich_help_panel=_PEOPLE)(exiting(_command))
# Options behind the benchmark's name are the benchmark's.
app.command(
    rich_help_panel=_PEOPLE,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)(exiting(bench.bench))
app.add_typer(trajectories.app, name="trajectories", rich_help_panel=_PEOPLE)
app.command(rich_help_panel=_SERVICES)(topics.topics)
app.command(rich_help_panel=_SERVICES)(exiting(trainer.trainer))
for _service in services.SERVICES:
    app.command(_service.name, help=_service.help_text(), rich_help_panel=_SERVICES)(_service.command())


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    try:
        app(arguments)
    except (PolarError, ValidationError, ModuleNotFoundError) as error:
        explain(error)
        sys.exit(status_of(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
