"""What the documents name exists: files, commands, make targets, environment variables."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from polar import settings
from polar.cli.main import app
from polar.rewards import RewardProgram
from polar.rollout.requests import parse_task
from schemas import export, tasks
from tests.architecture.tree import ROOT, project_files, text_of

DOCUMENTS = [name for name in project_files() if name.suffix == ".md" and name.parts[0] != "schemas"]
REQUIRED = {"README.md", "ARCHITECTURE.md", "DECISIONS.md", "CONTRIBUTING.md", "CHANGELOG.md"}
PATH = re.compile(r"`((?:polar|schemas|streams|tests|deploy|bench|examples)/[\w./*-]*)`")
COMMAND = re.compile(r"\bpolar ([a-z][a-z-]+)(?=[`\s]|$)")
NOT_A_COMMAND = {
    "is",
    "on",
    "itself",
    "never",
    "as",
    "with",
    "reads",
    "rl",
    "needs",
    "runs",
    "starts",
    "from",
}
TARGET = re.compile(r"`?\bmake ([a-z]+)\b")
VARIABLE = re.compile(r"\bPOLAR_[A-Z_]+[A-Z]\b")
GIVEN_TO_PROGRAMS = {
    "POLAR_BASE_URL_PREFIXED", "POLAR_SESSION_ID", "POLAR_TASK_ID", "POLAR_MEMBER", "POLAR_PROMPT",
    "POLAR_METADATA", "POLAR_RUNTIME_DIR", "POLAR_OUTCOME",
}  # fmt: skip
"""Set by a node for harnesses and evaluators, read by those."""
FOR_TESTS = {"POLAR_CASES_DIR", "POLAR_FIXTURES_DIR", "POLAR_QWEN3_TOKENIZER"}


def document_id(name: Path) -> str:
    return str(name)


def code_of(text: str) -> str:
    """The parts of a document that are code: fenced blocks and inline code."""
    fenced = re.findall(r"^(?:```|    )(.*)$", text, re.MULTILINE) + re.findall(
        r"```[a-z]*\n(.*?)```", text, re.DOTALL
    )
    return "\n".join([*fenced, *re.findall(r"`([^`\n]+)`", text)])


def known_variables() -> set[str]:
    return {
        f"{kind.model_config.get('env_prefix')}{field}".upper()
        for kind in vars(settings).values()
        if isinstance(kind, type) and issubclass(kind, settings.BaseSettings)
        for field in kind.model_fields
    }


def test_the_documents_are_there() -> None:
    assert {str(name) for name in DOCUMENTS} >= REQUIRED
    assert "Apache License" in text_of(Path("LICENSE"))
    assert "### Contracts" in text_of(Path("CHANGELOG.md"))


def test_architecture_holds_the_topics_table_as_it_is() -> None:
    assert export.topics_table() in text_of(Path("ARCHITECTURE.md")), (
        "copy schemas/generated/topics.md into ARCHITECTURE.md"
    )


def test_the_readme_s_task_is_accepted_and_its_program_is_a_reward_program() -> None:
    readme = text_of(Path("README.md"))
    (task,) = re.findall(r"<<'END'\n(\{.*?\})\nEND", readme, re.DOTALL)
    assert parse_task("application/json", task.encode()).num_samples == 8
    (spec,) = re.findall(r"`\"reward\": (\{.*?\}\})`", readme)
    assert set(tasks.RewardSpec.model_validate_json(spec).weights) == {"brevity"}
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    defined: dict[str, Any] = {"__name__": "readme"}
    exec(compile(program, "README.md", "exec"), defined)
    assert isinstance(defined["brevity"], RewardProgram)


@pytest.mark.parametrize("name", DOCUMENTS, ids=document_id)
def test_named_files_exist(name: Path) -> None:
    missing = [path for path in PATH.findall(text_of(name)) if not list(ROOT.glob(path.rstrip("/")))]
    assert missing == []


@pytest.mark.parametrize("name", DOCUMENTS, ids=document_id)
def test_named_commands_exist(name: Path) -> None:
    group: Any = typer.main.get_command(app)
    named = set(COMMAND.findall(code_of(text_of(name)))) - NOT_A_COMMAND
    assert named <= set(group.commands)


@pytest.mark.parametrize("name", DOCUMENTS, ids=document_id)
def test_named_make_targets_exist(name: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", text_of(Path("Makefile")), re.MULTILINE))
    assert set(TARGET.findall(code_of(text_of(name)))) <= targets


@pytest.mark.parametrize("name", DOCUMENTS, ids=document_id)
def test_named_variables_are_settings(name: Path) -> None:
    assert set(VARIABLE.findall(text_of(name))) <= known_variables() | GIVEN_TO_PROGRAMS | FOR_TESTS
