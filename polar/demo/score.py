"""Evaluator of the demo: run as a file in the runtime, after the agent; standard library only.

Computes the score from what the agent left (result.json) and from the episode (POLAR_METADATA),
and prints it as JSON. No result, or a broken one, scores 0: only the final answer counts.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def score_shop(episode: dict[str, Any], result: dict[str, Any]) -> float:
    """1.0 for the right price, else 0.0."""
    right = int(episode["quantity"]) * int(episode["prices"][episode["item"]])
    return 1.0 if result.get("answer") == right else 0.0


def score_letters(result: dict[str, Any]) -> float:
    """Share of a-m among the ASCII letters of all answers, upper or lower case; 0.0 without letters."""
    letters = [c for text in result.get("answers", []) for c in str(text).lower() if "a" <= c <= "z"]
    return sum(c <= "m" for c in letters) / len(letters) if letters else 0.0


def score(episode: dict[str, Any], result: dict[str, Any]) -> float:
    """Score of an episode of either kind."""
    return score_letters(result) if episode["kind"] == "letters" else score_shop(episode, result)


def main() -> int:
    """Print `{"outcome": score}`."""
    episode = json.loads(os.environ["POLAR_METADATA"])
    try:
        result = json.loads(Path("result.json").read_text())
    except (OSError, ValueError):
        result = {}
    sys.stdout.write(json.dumps({"outcome": score(episode, result)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
