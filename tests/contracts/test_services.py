"""The services' table, the command line and the apps agree with each other."""

import importlib
import inspect
from typing import Any

import pytest

from polar.cli.services import SERVICES as COMMANDS
from polar.cli.services import Service
from polar.settings import LogSettings
from schemas.services import SERVICES

STREAMS = [service for service in COMMANDS if service.is_stream]
OUTSIDE = {"rollout-api", "reward-program"}
"""A part of the scheduler's process, and programs of users."""
WITHOUT_THE_LOG = {"engine", "broker"}


def service_id(service: Service) -> str:
    return service.name


def test_every_service_of_the_table_has_a_command() -> None:
    commands = {service.name for service in COMMANDS} | {"trainer"}
    assert set(SERVICES) - OUTSIDE == commands - WITHOUT_THE_LOG


@pytest.mark.parametrize("service", STREAMS, ids=service_id)
def test_a_stage_takes_its_settings_and_reads_what_the_table_says(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(service.entry.partition(":")[0])
    taken: list[dict[str, Any]] = []

    def stage_app(settings: LogSettings, core: object, topics: Any, **options: Any) -> None:
        taken.append({"settings": settings, "topics": topics, **options})

    monkeypatch.setattr(module, "stage_app", stage_app)
    service.load()(*(kind() for kind in service.settings))
    (options,) = taken
    assert [topic.suffix for topic in options["topics"]] != []
    assert {topic.suffix for topic in options["topics"]} == {
        topic.suffix for topic in SERVICES[service.name].reads
    }
    assert {topic.suffix for topic in options.get("start_at_beginning", ())} <= {
        topic.suffix for topic in options["topics"]
    }
    assert options["group_id"] == f"polar.{service.name}"


@pytest.mark.parametrize("service", COMMANDS, ids=service_id)
def test_an_entry_takes_the_settings_that_its_command_hands_over(service: Service) -> None:
    parameters = list(inspect.signature(service.load(), eval_str=True).parameters.values())
    annotations = tuple(parameter.annotation for parameter in parameters)[: len(service.settings)]
    assert annotations == service.settings
    assert all(p.default is not p.empty for p in parameters[len(service.settings) :])
