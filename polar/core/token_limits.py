"""How many tokens a call may sample.

Invariant: a limit above what is possible is lowered, never refused: harnesses ask for 32,000 or
128,000 tokens whatever the context is. A limit that fits the context, but not what the prompt
leaves of it, is lowered by the engine itself.
"""

from typing import Any


def lower_limit(
    body: dict[str, Any], used: dict[str, Any], *, context_tokens: int | None, budget_tokens: int | None
) -> None:
    """Lower `max_tokens` of an engine's request, and of what the record says was used.

    `budget_tokens` bounds also a call that names no limit. What is no whole number stays: the
    engine says what is wrong with it.
    """
    asked = body.get("max_tokens")
    if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool)):
        return
    bounds = [bound for bound in (context_tokens, budget_tokens) if bound is not None]
    if asked is None:
        bounds = [] if budget_tokens is None else [budget_tokens]
    else:
        bounds.append(asked)
    if bounds and min(bounds) != asked:
        body["max_tokens"] = used["max_tokens"] = min(bounds)
