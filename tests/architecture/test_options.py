"""An option that nothing reads is a defect: settings and fields of a task are used by code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic_settings import BaseSettings

from polar import settings
from schemas import tasks
from tests.architecture.tree import python_files, text_of

SETTINGS = [
    value
    for value in vars(settings).values()
    if isinstance(value, type) and issubclass(value, BaseSettings) and value is not BaseSettings
]
SPECS = [
    tasks.TaskRequest,
    tasks.RuntimeSpec,
    tasks.HarnessSpec,
    tasks.EvaluatorSpec,
    tasks.RewardSpec,
    tasks.SamplingSpec,
    tasks.TimeoutSpec,
    tasks.LimitSpec,
]
ONE_VALUE_YET = {("RuntimeSpec", "kind"), ("HarnessSpec", "kind")}
"""Checked by validation alone; the second runtime or harness will read them."""


@cache
def attributes_read(name: Path) -> frozenset[str]:
    return frozenset(
        node.attr
        for node in ast.walk(ast.parse(text_of(name)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    )


def sources() -> list[Path]:
    return [name for name in python_files("polar", "streams") if name != Path("polar/settings.py")]


def options(models: list[type[BaseModel]]) -> list[tuple[type[BaseModel], str]]:
    return [(model, field) for model in models for field in model.model_fields]


def option_id(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("model", "field"), options([*SETTINGS]), ids=option_id)
def test_setting_is_read_in_a_package_that_uses_its_class(model: type[BaseModel], field: str) -> None:
    users = {name.parent for name in sources() if re.search(rf"\b{model.__name__}\b", text_of(name))}
    assert users, f"no code uses {model.__name__}"
    near = [name for name in sources() if name.parent in users]
    assert any(field in attributes_read(name) for name in near), f"{model.__name__}.{field} is read nowhere"


@pytest.mark.parametrize(("model", "field"), options([*SPECS]), ids=option_id)
def test_field_of_a_task_is_read(model: type[BaseModel], field: str) -> None:
    if (model.__name__, field) in ONE_VALUE_YET:
        return
    assert any(field in attributes_read(name) for name in sources()), (
        f"{model.__name__}.{field} is read nowhere"
    )


def test_environment_variables_are_unique() -> None:
    names = [
        f"{model.model_config['env_prefix']}{field}".upper()
        for model in SETTINGS
        for field in model.model_fields
    ]
    assert len(names) == len(set(names))
    assert all(name.startswith("POLAR_") for name in names)


def test_only_settings_reads_polar_variables() -> None:
    reading = re.compile(r"environ(\.get\(|\[)\s*[\"']POLAR_|getenv\(\s*[\"']POLAR_")
    found = [str(name) for name in sources() if reading.search(text_of(name))]
    # The demo's agents and scorer are harness programs: a node gives them their variables.
    assert [name for name in found if not name.startswith("polar/demo/")] == []
