"""Exit statuses of `polar`, and the one place where an error becomes one."""

import functools
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import ParamSpec

import typer
from pydantic import ValidationError

from polar.errors import PolarError, SettingsError

P = ParamSpec("P")


class Exit(IntEnum):
    """What the status of a command says."""

    OK = 0
    FAILED = 1
    """The command ran and its result is bad."""
    USAGE = 2
    """Options or settings are wrong."""
    MISSING = 3
    """Something that the command needs is not installed or not there."""


class MissingError(PolarError):
    """Something that a command needs is not there; the message says what to type."""


def exiting(command: Callable[P, int | None]) -> Callable[P, None]:
    """The command with its result, where it is not 0, as exit status."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        status = command(*args, **kwargs)
        if status:
            raise typer.Exit(status)

    return run


def status_of(error: BaseException) -> Exit:
    """Exit status of an error that ends a command."""
    if isinstance(error, MissingError | ModuleNotFoundError):
        return Exit.MISSING
    if isinstance(error, SettingsError | ValidationError):
        return Exit.USAGE
    return Exit.FAILED


def explain(error: BaseException) -> None:
    """Say on stderr what went wrong, without a traceback."""
    if isinstance(error, ModuleNotFoundError):
        text = f"{error}; `polar doctor` says what to install"
    elif isinstance(error, ValidationError):
        text = "; ".join(
            f"{error.title}.{'.'.join(map(str, item['loc']))}: {item['msg']}"
            for item in error.errors(include_url=False)
        )
    else:
        text = str(error) or type(error).__name__
    sys.stderr.write(f"polar: {text}\n")
