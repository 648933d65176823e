"""Rules about files as such: size, names, docstrings, and what no file may contain."""

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.tree import project_files, python_files, text_of

MAX_LINES = 400
DRAWERS = {"utils", "util", "helpers", "helper", "common", "misc", "types", "models"}
MODELS_IS_A_SUBJECT = Path("polar/engines/models.py")
"""`python -m polar.engines.models`: language models are what it is about."""
MACHINE_PATH = re.compile(r"(?<![\w.~}\-])/(work|tmp|root)/")
HOSTS = re.compile(
    r"pypi\.org|pythonhosted\.org|npmjs\.(org|com)|pytorch\.org|debian\.org|huggingface\.co|hf\.co\b"
    r"|docker\.io|ghcr\.io|quay\.io|nvcr\.io"
)
TORCH_INDEX = re.compile(r"^TORCH_CPU_INDEX \?= https://download\.pytorch\.org/whl/cpu$", re.MULTILINE)
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
THIS_FILE = Path("tests/architecture/test_files.py")


def python_ids(name: Path) -> str:
    return str(name)


@pytest.mark.parametrize("name", python_files(), ids=python_ids)
def test_python_file_has_one_responsibility(name: Path) -> None:
    lines = text_of(name).count("\n")
    assert lines <= MAX_LINES, f"{name} has {lines} lines: split it by responsibility"
    if name != MODELS_IS_A_SUBJECT:
        assert name.stem not in DRAWERS, f"{name}: a name not found is a responsibility not found"


@pytest.mark.parametrize(
    "name", python_files("polar", "schemas", "streams", "bench", "examples", "tests"), ids=python_ids
)
def test_module_says_what_it_is_for(name: Path) -> None:
    source = text_of(name)
    if source.strip():
        assert ast.get_docstring(ast.parse(source)), f"{name} has no module docstring"


def test_no_file_names_a_machine_or_a_download_host() -> None:
    found = []
    for name in project_files():
        if name == THIS_FILE:
            continue
        text = text_of(name)
        if name == Path("Makefile"):
            assert TORCH_INDEX.search(text), "the one download host is the default of TORCH_CPU_INDEX"
            text = TORCH_INDEX.sub("", text)
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line) or HOSTS.search(line):
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    assert found == []


def test_nothing_is_left_unfinished() -> None:
    found = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name in python_files()
        if name != THIS_FILE
        for number, line in enumerate(text_of(name).splitlines(), start=1)
        if UNFINISHED.search(line)
    ]
    assert found == []
