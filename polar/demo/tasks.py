"""Episodes of the demo, a pure function of (seed, step, index)."""

import random
import sys
from pathlib import Path
from typing import Any

from schemas.tasks import (
    EvaluatorSpec,
    HarnessSpec,
    RewardSpec,
    SamplingSpec,
    TaskRequest,
    TimeoutSpec,
)

ITEMS = (
    "apple", "banana", "bread", "butter", "candle", "carrot", "cheese", "coffee", "cookie", "lemon",
    "melon", "onion", "orange", "pencil", "pepper", "potato", "rice", "salt", "sugar", "tomato",
)  # fmt: skip
GROUP_SIZE = 8
MAX_TOKENS = 12


def task_id(seed: int, step: int, index: int) -> str:
    """Id of the index-th task of a step: the same after a restart, so submitting again is harmless."""
    return f"demo-{seed}-{step}-{index}"


def episode(kind: str, seed: int, step: int, index: int) -> dict[str, Any]:
    """What all members of a group share: item, quantity and a fresh price table (or a word)."""
    draw = random.Random(f"polar-demo/{kind}/{seed}/{step}/{index}")  # noqa: S311  (episodes, no secrets)
    item = draw.choice(ITEMS)
    if kind == "letters":
        return {"kind": kind, "seed_word": item}
    return {
        "kind": kind,
        "item": item,
        "quantity": draw.randint(3, 19),
        "prices": {name: draw.randint(11, 99) for name in ITEMS},
    }


def make_task(
    kind: str, *, seed: int, step: int, index: int, journal: Path, reward_program: bool
) -> TaskRequest:
    """A group of eight sessions of one episode.

    `journal`: file to which the agent notes its answers. With a reward program the score comes
    from outside, and the node evaluates nothing.
    """
    here = Path(__file__).parent
    agent = here / "agents" / f"{kind}_agent.py"
    evaluator = EvaluatorSpec(kind="command", command=f"{sys.executable} {here / 'score.py'}")
    return TaskRequest(
        task_id=task_id(seed, step, index),
        harness=HarnessSpec(command=f"{sys.executable} {agent}", env={"AGENT_JOURNAL": str(journal)}),
        num_samples=GROUP_SIZE,
        evaluator=EvaluatorSpec(kind="none") if reward_program else evaluator,
        reward=RewardSpec(required=("outcome",)),
        sampling=SamplingSpec(temperature=1.0, max_tokens=MAX_TOKENS),
        timeouts=TimeoutSpec(run_seconds=300.0, group_seconds=900.0),
        metadata=episode(kind, seed, step, index),
    )
