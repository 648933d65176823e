"""`polar bench`: finds what the checkout has, hands the arguments on, says so without a checkout."""

import json
import sys
from pathlib import Path

import pytest

from polar.cli import bench as bench_command
from polar.cli.exits import Exit, MissingError
from polar.cli.main import main
from tests.unit.cli.test_commands import run

PROGRAM = """import json

def main(argv):
    print("working")
    print(json.dumps({"name": "trial", "argv": argv}))
    return 1 if "--fail" in argv else 0
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch) -> Path:
    """A folder with the benchmarks `tried`, `trusted` and `other`."""
    folder = tmp_path / "trial_benchmarks"
    folder.mkdir()
    for name in ("tried", "trusted", "other"):
        (folder / f"bench_{name}.py").write_text(PROGRAM)
    (folder / "record.py").write_text("")
    monkeypatch.setattr(bench_command, "BENCH", folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    return int(ended.value.code or 0)


def test_without_a_name_it_lists_what_is_there(checkout: Path, capsys) -> None:
    assert status() == Exit.OK
    assert capsys.readouterr().out.split() == ["other", "tried", "trusted"]


def test_arguments_behind_the_name_are_the_benchmark_s(checkout: Path, capsys) -> None:
    assert status("oth", "--json", "--help", "-n", "3") == Exit.OK
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last)["argv"] == ["--json", "--help", "-n", "3"]


def test_the_status_is_the_benchmark_s(checkout: Path) -> None:
    assert status("tried", "--fail") == Exit.FAILED


@pytest.mark.parametrize("name", ["none", "tr", "record"])
def test_a_name_that_is_unknown_or_fits_two_is_wrong_usage(checkout: Path, name: str, capsys) -> None:
    assert status(name) == Exit.USAGE
    assert "other, tried, trusted" in " ".join(capsys.readouterr().err.split())


def test_an_installed_package_names_the_checkout(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="Clone the repository"):
        bench_command.benchmarks(tmp_path)


def test_this_checkout_s_benchmarks_understand_json() -> None:
    listed = run("bench").stdout.split()
    assert "codec" in listed
    for name in listed:
        helped = run("bench", name, "--help")
        assert helped.returncode == 0, helped.stderr
        assert f"polar bench {name}" in helped.stdout
        assert "--json" in helped.stdout
