"""How a benchmark leaves its figures: as the last line of stdout, and the same in bench/results/.

A result names the commit (with `+` when the tree had changes), the command and the machine, so
that two figures are compared only when they are comparable.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results")


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The command line of one benchmark, with the options that all have."""
    made = argparse.ArgumentParser(
        prog=f"polar bench {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", action="store_true", help="print the JSON object and nothing else")
    return made


def median_seconds(work: Callable[[], object], *, repeats: int = 30) -> float:
    """Median wall time in seconds of one call, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def record(name: str, figures: Mapping[str, Any], *, only_json: bool, keep: bool = True) -> None:
    """Print the figures of one benchmark, the last line as one JSON object.

    `figures` are numbers, texts, or mappings of them, at the top level of the object. With
    `keep` the object stays as bench/results/NAME.json.
    """
    result = {
        "name": name,
        "command": f"python -m bench.bench_{name}",
        "commit": _commit(),
        "machine": f"{os.cpu_count()} processors, {platform.machine()}, Python {platform.python_version()}",
        **_rounded(figures),
    }
    if keep:
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    if not only_json:
        print("\n".join(_lines(result)))
    print(json.dumps(result), flush=True)


def _rounded(value: Any) -> Any:
    """Three decimals, or four significant digits of what is smaller than that."""
    if isinstance(value, Mapping):
        return {str(key): _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return round(value, 3) if abs(value) >= 1 else float(f"{value:.4g}")
    return value


def _lines(value: Mapping[str, Any], indent: str = "") -> list[str]:
    """The object for people: a line a figure, nested ones indented."""
    lines = []
    for key, each in value.items():
        if isinstance(each, Mapping):
            lines += [f"{indent}{key}", *_lines(each, indent + "  ")]
        else:
            lines.append(f"{indent}{key:<34} {each}")
    return lines


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!bench/results")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
