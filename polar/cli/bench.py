"""`polar bench`: run a benchmark of the checkout that this package was installed from."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, cast

import typer

from polar.cli.exits import Exit, MissingError

Name = Annotated[
    str | None, typer.Argument(help="A benchmark, or the beginning of its name; none lists all.")
]
Arguments = Annotated[
    list[str] | None, typer.Argument(help="What follows the name goes to the benchmark (try --help).")
]

BENCH = Path(__file__).resolve().parents[2] / "bench"
PREFIX = "bench_"


def bench(name: Name = None, arguments: Arguments = None) -> int:
    """Run a benchmark; its last line of output is one JSON object.

    With --json the benchmark prints nothing else. Exit status 3 outside of a checkout: the
    benchmarks are no part of an installed package.
    """
    known = benchmarks(BENCH)
    if name is None:
        sys.stdout.write("".join(f"{each}\n" for each in known))
        return Exit.OK
    chosen = [name] if name in known else [each for each in known if each.startswith(name)]
    if len(chosen) != 1:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="NAME")
    # The root of the checkout comes first, as with `python -m bench.bench_NAME` there.
    sys.path.insert(0, str(BENCH.parent))
    module = importlib.import_module(f"{BENCH.name}.{PREFIX}{chosen[0]}")
    return cast("Callable[[list[str]], int]", module.main)(arguments or [])


def benchmarks(folder: Path) -> list[str]:
    """Names of the benchmarks in a checkout's folder, sorted.

    Raises MissingError when there are none.
    """
    found = sorted(path.stem.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*.py"))
    if not found:
        raise MissingError(
            f"no benchmarks in {folder}: they are no part of an installed package. Clone the repository "
            "and type `make bench` there, or `pip install -e .` and `polar bench` again"
        )
    return found
