"""How a benchmark leaves its figures: one JSON line on stdout, the same in bench/results/.

A result names the commit (with `+` when the tree had changes), the command and the machine, so
that two figures are compared only when they are comparable.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results")


def median_seconds(work: Callable[[], object], *, repeats: int = 30) -> float:
    """Median wall time in seconds of one call, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def record(name: str, figures: Mapping[str, float]) -> None:
    """Print the figures of one benchmark and keep them as bench/results/NAME.json."""
    result = {
        "name": name,
        "command": f"python -m bench.{Path(sys.argv[0]).stem}",
        "commit": _commit(),
        "machine": f"{os.cpu_count()} processors, {platform.machine()}, Python {platform.python_version()}",
        "figures": {key: round(value, 3) for key, value in figures.items()},
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!bench/results")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
