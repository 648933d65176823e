"""Imports go one way, cores are pure, and light things stay light."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
HEAVY = "aiokafka, faststream, httpx, torch, transformers"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINT_IMPORTS, "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_contracts_hold() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def test_import_contracts_catch_every_kind_of_violation(tmp_path: Path) -> None:
    for package in ("polar", "schemas", "streams"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    violations = {
        "polar/core/impure.py": "import asyncio\n",
        "polar/settings.py": "import aiokafka\n",
        "polar/errors.py": "import streams\n",
        "polar/telemetry/upward.py": "import polar.kafka\n",
    }
    for name, line in violations.items():
        with (tmp_path / name).open("a") as file:
            file.write(line)
    result = lint(tmp_path)
    assert result.returncode == 1
    assert "4 broken" in result.stdout, result.stdout[-4000:] + result.stderr[-4000:]


def loaded_of(heavy: str, importing: str) -> str:
    program = f"""
import importlib, pkgutil, sys
for name in {importing!r}.split(", "):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", ()), name + "."):
        importlib.import_module(module.name)
print(", ".join(sorted(set({heavy!r}.split(", ")) & set(sys.modules))))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("package", ["schemas", "polar.core"])
def test_contracts_and_cores_load_nothing_heavy(package: str) -> None:
    assert loaded_of(HEAVY, package) == ""


def test_parsing_a_command_line_loads_nothing_heavy() -> None:
    assert loaded_of("torch, transformers, vllm, megatron", "polar.cli.main") == ""
