"""Reads the given fault cases (folder in POLAR_CASES_DIR) in the project's own terms."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

Case = dict[str, Any]

_FOLDER = os.environ.get("POLAR_CASES_DIR", "")


def cases(kind: str, *, given: str | None = None, without: tuple[str, ...] = ()) -> list[Any]:
    """One pytest parameter a case; a single skipped one where the folder is not given.

    `given`: only cases whose input has this key. `without`: ids that are left out.
    """
    path = Path(_FOLDER) / f"{kind}.jsonl"
    if not _FOLDER or not path.exists():
        reason = f"POLAR_CASES_DIR names no folder with {kind}.jsonl: the given cases are NOT checked"
        return [pytest.param({}, id="no-cases", marks=pytest.mark.skip(reason=reason))]
    read = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    chosen = [
        case for case in read if (given is None or given in case["given"]) and case["id"] not in without
    ]
    return [pytest.param(case, id=case["id"]) for case in chosen]


def number(value: Any) -> float:
    """A number of a case; JSON's missing ones are strings, null is NaN."""
    return float("nan") if value is None else float(value)
