"""deploy/compose: valid by the compose specification, and in step with the program it starts.

The schema is the compose specification's own, as the package check-jsonschema ships it.
"""

import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml

from polar import settings
from polar.cli.main import app
from polar.cli.services import SERVICES as SERVICE_COMMANDS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN = {name: service for name, service in SERVICES.items() if name != "kafka"}
LONG_RUNNING = [name for name in SERVICES if name != "topics" and not name.startswith("model-")]
VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::-([^}]*))?\}")

COMMANDS = {
    "gateway", "scheduler", "node", "stitcher", "grouper", "packer", "trainer", "weight-sync", "engine",
    "topics",
}  # fmt: skip
SETTINGS_OF: dict[str, tuple[Any, ...]] = {
    **{service.name: service.settings for service in SERVICE_COMMANDS},
    "trainer": (settings.LogSettings, settings.TrainerSettings),
    "topics": (settings.LogSettings,),
}


def command_of(service: dict[str, Any]) -> str | None:
    """The `polar` command that a service runs; none where the entry point is another program."""
    return None if "entrypoint" in service else service["command"][0]


def commands_of_the_cli() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def interpolated(value: Any) -> Any:
    """The document with the defaults of its variables, as compose reads it without a .env file."""
    if isinstance(value, dict):
        return {key: interpolated(item) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item) for item in value]
    return VARIABLE.sub(lambda match: match[2] or "", value) if isinstance(value, str) else value


def test_it_is_a_compose_file() -> None:
    folder = importlib.resources.files("check_jsonschema.builtin_schemas")
    schema = json.loads(folder.joinpath("vendor", "compose-spec.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(interpolated(COMPOSE))
    broken = {**COMPOSE, "services": {**SERVICES, "kafka": {**SERVICES["kafka"], "enviroment": {}}}}
    assert not validator.is_valid(broken), "the schema must see a misspelt key"


def test_every_service_is_there_and_each_command_exists() -> None:
    commands = {command for service in OWN.values() if (command := command_of(service))}
    assert commands == COMMANDS
    assert commands <= set(commands_of_the_cli())


@pytest.mark.parametrize("name", OWN)
def test_a_command_line_parses(name: str) -> None:
    command = command_of(OWN[name])
    if command is None:
        return
    parsed = commands_of_the_cli()[command].make_context(command, list(OWN[name]["command"][1:]))
    assert parsed.params is not None


@pytest.mark.parametrize("name", [name for name in OWN if command_of(OWN[name])])
def test_environment_is_made_of_known_settings_with_valid_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = command_of(OWN[name])
    assert command
    classes = SETTINGS_OF[command]
    environment = {key: str(value) for key, value in interpolated(OWN[name]["environment"]).items()}
    known = {
        f"{kind.model_config.get('env_prefix')}{field}".upper(): kind
        for kind in classes
        for field in kind.model_fields
    }
    assert set(environment) <= set(known), f"{name} sets what {command} does not read"
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    for kind in classes:
        kind()


def test_every_service_reaches_the_same_log() -> None:
    shared = {f"POLAR_{field}".upper() for field in settings.LogSettings.model_fields}
    values = {
        tuple((key, value) for key, value in sorted(service["environment"].items()) if key in shared)
        for service in OWN.values()
        if shared & set(service.get("environment", {}))
    }
    assert len(values) == 1


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_long_running_service_restarts_and_has_a_plausible_healthcheck(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    kind, program, *arguments = service["healthcheck"]["test"]
    assert kind == "CMD"
    if program == "python":
        assert arguments[0] == "-c"
        compile(arguments[1], name, "exec")
        assert "timeout" in arguments[1] or ", 5)" in arguments[1], "a healthcheck has a time-out of its own"
    else:
        assert program == "/opt/kafka/bin/kafka-broker-api-versions.sh"
    assert service["healthcheck"]["start_period"]


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("gateway", "POLAR_GATEWAY_PORT"),
        ("scheduler", "POLAR_SCHEDULER_PORT"),
        ("engine-cpu", "POLAR_ENGINE_PORT"),
        ("engine-gpu", "POLAR_ENGINE_PORT"),
    ],
)
def test_a_healthcheck_asks_the_port_that_the_service_listens_on(name: str, variable: str) -> None:
    service = SERVICES[name]
    assert f"127.0.0.1:{service['environment'][variable]}/health" in service["healthcheck"]["test"][-1]


def test_urls_between_services_name_services_and_their_ports() -> None:
    reachable = {f"http://gateway:{SERVICES['gateway']['environment']['POLAR_GATEWAY_PORT']}"}
    for kind in ("cpu", "gpu"):
        engine = SERVICES[f"engine-{kind}"]
        assert "engine" in engine["networks"]["default"]["aliases"]
        reachable.add(f"http://engine:{engine['environment']['POLAR_ENGINE_PORT']}")
    used = {
        url
        for service in OWN.values()
        for key, value in service.get("environment", {}).items()
        if key.endswith(("_ENGINES", "_PUBLIC_URL"))
        for url in re.findall(r"http://[a-z]+:\d+", str(value))
    }
    assert used == reachable


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_profile_brings_up_the_whole_loop_once(profile: str) -> None:
    active = {name for name, service in SERVICES.items() if profile in service["profiles"]}
    commands = sorted(
        command for name in active if name != "kafka" and (command := command_of(SERVICES[name]))
    )
    assert commands == sorted(COMMANDS)
    for name in active:
        for needed, how in SERVICES[name].get("depends_on", {}).items():
            assert needed in active or how.get("required") is False, (
                f"{name} waits for {needed}, which profile {profile} does not start"
            )


def test_volumes_and_secrets_are_declared() -> None:
    used = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert used == set(COMPOSE["volumes"])
    assert {secret for service in OWN.values() for secret in service.get("secrets", [])} == set(
        COMPOSE["secrets"]
    )


def test_published_weights_have_the_same_path_everywhere() -> None:
    mounts = {
        volume.split(":")[1]
        for service in SERVICES.values()
        for volume in service.get("volumes", [])
        if volume.startswith("trainer:")
    }
    output = {
        SERVICES[f"trainer-{kind}"]["environment"]["POLAR_TRAINER_OUTPUT_DIR"] for kind in ("cpu", "gpu")
    }
    assert mounts == output


def test_env_example_lists_exactly_the_variables_with_their_defaults() -> None:
    text = (FOLDER / "compose.yaml").read_text()
    used = {match[1]: match[2] for match in VARIABLE.finditer(text)}
    lines = (FOLDER / ".env.example").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert given == used


def test_dockerfile_targets_and_copied_files_exist() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    assert {service["build"]["target"] for service in OWN.values()} <= targets
    copied = re.findall(r"^COPY --chown=\S+ (.+) \S+$", dockerfile, re.MULTILINE)
    names = {name for group in copied for name in group.split()}
    kept = set(re.findall(r"^!(\S+)$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.MULTILINE))
    assert names == kept
    assert all((ROOT / name).exists() for name in names)
