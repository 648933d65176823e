"""A reward program for the demo's tasks: start it beside a run, or long after one.

    polar demo --reward examples/reward_demo.py        scores the demo from outside
    python examples/reward_demo.py                     beside any run (POLAR_BOOTSTRAP_SERVERS, …)

`outcome` is worked out from the conversation alone. In the shop task the question names item
and quantity and the tool's reply the price; in the letters task of `--quick` it is the share of
a-m among the letters of the answers. `format` says how many answers were well-formed; it counts
only for tasks whose reward spec names it:

    "reward": {"required": ["outcome"], "optional": ["format"], "weights": {"format": 0.1}}
"""

import re
from collections.abc import Iterable, Mapping

from polar.rewards import TrajectoryView, reward, run
from polar.rewards.view import text_of

QUESTION = re.compile(r"What is the price of (\d+) x ([a-z]+)\?")
PRICE = re.compile(r"([a-z]+) = (\d+)")
COMMAND = re.compile(r"GET:?\s+[a-z]+\.?|CALC:?\s*\d{1,6} ?\* ?\d{1,6}|ANSWER:?\s*\d+\.?")
ANSWER = re.compile(r"ANSWER:?\s*(\d+)\.?")


@reward("outcome", "format", evaluator="reward_demo", version="1")
async def demo(trajectory: TrajectoryView) -> Mapping[str, float]:
    """Scores of either task."""
    questions = [
        question
        for message in trajectory.conversation
        if message.get("role") == "user" and (question := QUESTION.fullmatch(text_of(message)))
    ]
    answers = [text.strip() for text in trajectory.answers]
    if not questions:
        return {"outcome": share_of_early_letters(answers), "format": share(map(str.isascii, answers))}
    # Worked examples come first in the conversation; the last question is the real one.
    quantity, item = questions[-1].groups()
    is_right = right_answer(trajectory, int(quantity), item, questions[-1].string)
    return {
        "outcome": float(is_right),
        "format": share(COMMAND.fullmatch(text) is not None for text in answers),
    }


def right_answer(trajectory: TrajectoryView, quantity: int, item: str, question: str) -> bool:
    """Whether the last answer is quantity x the price that a tool told after the question."""
    price, is_asked = None, False
    for message in trajectory.conversation:
        text = text_of(message)
        is_asked = is_asked or text == question
        if is_asked and (told := PRICE.fullmatch(text)) and told[1] == item:
            price = int(told[2])
    answer = ANSWER.fullmatch(trajectory.last_answer.strip())
    return price is not None and answer is not None and int(answer[1]) == quantity * price


def share_of_early_letters(texts: list[str]) -> float:
    """Share of a-m among the ASCII letters, upper or lower case; 0.0 without letters."""
    return share(letter <= "m" for text in texts for letter in text.lower() if "a" <= letter <= "z")


def share(checks: Iterable[bool]) -> float:
    """Share of true values; 0.0 of none."""
    values = list(checks)
    return sum(values) / len(values) if values else 0.0


if __name__ == "__main__":
    run([__file__])
