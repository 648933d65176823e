"""The shop task: what the agent does with a reply, what an episode is, and its score."""

import ast
import sys
from pathlib import Path

import pytest

import polar.demo.agents
from polar.demo.agents.shop_agent import step
from polar.demo.score import score
from polar.demo.tasks import episode, make_task

PRICES = {"apple": 12, "rice": 40}


@pytest.mark.parametrize(
    ("reply", "call", "turn", "answer"),
    [
        ("GET apple", 1, "apple = 12", None),
        (" GET: rice.\n", 2, "rice = 40", None),
        ("GET lamp", 1, None, None),
        ("GET apple", 3, None, None),
        ("CALC 4 * 12", 2, "Result: 48", None),
        ("CALC:4*12", 1, "Result: 48", None),
        ("CALC 4 + 12", 1, None, None),
        ("CALC 4 * 12", 3, None, None),
        ("ANSWER 48", 3, None, 48),
        ("ANSWER: 48.", 1, None, 48),
        ("ANSWER 48 dollars", 1, None, None),
        ("", 1, None, None),
    ],
)
def test_what_follows_from_a_reply(reply: str, call: int, turn: str | None, answer: int | None) -> None:
    assert step(reply, call, PRICES) == (turn, answer)


def test_episodes_are_a_function_of_seed_step_and_index() -> None:
    assert episode("shop", 1, 2, 3) == episode("shop", 1, 2, 3)
    drawn = [episode("shop", 1, step, index) for step in range(10) for index in range(3)]
    assert len({str(one) for one in drawn}) == 30
    for one in drawn:
        assert 3 <= one["quantity"] <= 19
        assert one["item"] in one["prices"]
        assert all(11 <= price <= 99 for price in one["prices"].values())


def test_only_the_right_answer_scores() -> None:
    one = {"kind": "shop", "item": "rice", "quantity": 3, "prices": PRICES}
    assert score(one, {"answer": 120}) == 1.0
    assert score(one, {"answer": 119}) == 0.0
    assert score(one, {"answer": None}) == score(one, {}) == 0.0


def test_letters_score_is_the_share_of_a_to_m() -> None:
    assert score({"kind": "letters"}, {"answers": ["aM", "nz 7"]}) == 0.5
    assert score({"kind": "letters"}, {"answers": ["é 12"]}) == score({"kind": "letters"}, {}) == 0.0


def test_a_task_with_a_reward_program_is_not_evaluated_on_the_node(tmp_path: Path) -> None:
    task = make_task("shop", seed=1, step=0, index=0, journal=tmp_path / "j", reward_program=True)
    assert task.evaluator.kind == "none"
    assert task.reward.required == ("outcome",)
    assert task.num_samples == 8


def test_agents_use_the_openai_sdk_and_the_standard_library_only() -> None:
    folder = Path(polar.demo.agents.__file__).parent
    for path in folder.glob("*_agent.py"):
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).split(".")[0])
        assert imported - set(sys.stdlib_module_names) == {"openai"}, path
