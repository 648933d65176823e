"""What a session has used up of what its task allows it at the gateway."""

from dataclasses import dataclass

from schemas.tasks import LimitSpec


@dataclass(frozen=True, slots=True)
class Used:
    """Of one session, over all its calls so far."""

    calls: int
    """Numbers given, those of calls in flight included."""
    sampled_tokens: int
    """Of recorded calls."""


def exhausted(
    limits: LimitSpec, used: Used, *, choices: int, now: float, ends_at: float | None
) -> str | None:
    """Why a call with so many choices is over the budget, for a person; none when it is not.

    `now`, `ends_at`: unix seconds; `ends_at` is when `limits.max_seconds` are over.
    """
    if limits.max_calls is not None and used.calls + choices > limits.max_calls:
        return f"its {limits.max_calls} calls are used up (limits.max_calls)"
    if limits.max_sampled_tokens is not None and used.sampled_tokens >= limits.max_sampled_tokens:
        return f"its {limits.max_sampled_tokens} sampled tokens are used up (limits.max_sampled_tokens)"
    if ends_at is not None and now >= ends_at:
        return f"its {limits.max_seconds:g} seconds are over (limits.max_seconds)"
    return None


def tokens_left(limits: LimitSpec, used: Used) -> int | None:
    """What one call may still sample; none where the task sets no limit."""
    if limits.max_sampled_tokens is None:
        return None
    return max(1, limits.max_sampled_tokens - used.sampled_tokens)
