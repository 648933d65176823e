"""Which calls may be trained, and why the others may not.

Every call gets at most one reason, decided from the record alone, except `orphan_retry`, which
needs the whole session. A bad log-prob masks its token, never its call.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.calls import CallRecord, Delivery
from schemas.columns import FloatColumn
from schemas.trajectories import UsabilityRules

_ORDINARY_FINISH = frozenset({"stop", "length", "tool_calls"})
_LOGPROB_FLOOR = -9999.0
"""Engines write this where they have no log-prob."""
_TRAINER_LOGPROBS = "processed_logprobs"
"""The only meaning that equals the trainer's log-softmax of logits / temperature."""


@dataclass(slots=True)
class Rebuilt:
    """What is known of a call beyond its own record."""

    kind: str = "agent"
    prompt_tokens: int = 0
    """Length of the whole prompt."""
    invalid_ids: bool = False
    """An id of prompt or completion is outside the vocabulary."""
    media_messages: int = 0
    """Parts in the messages of its whole history that are no text."""
    media_parts: int = 0
    """Those that the prompt refers to by digest."""


def own_reason(
    record: CallRecord, rules: UsabilityRules, rebuilt: Rebuilt, *, session_trainable: bool = True
) -> str | None:
    """Reason, seen in the call alone, why no token of it may be trained; or None."""
    if record.untrainable is not None:
        return record.untrainable
    if not session_trainable:
        return "session_untrainable"
    if rebuilt.kind not in rules.train_kinds:
        return "auxiliary"
    if record.delivery is not Delivery.DELIVERED:
        return record.delivery.value
    finish = record.finish_reason
    if finish not in _ORDINARY_FINISH:
        return f"finish_{finish}" if finish in ("abort", "error") else "finish_unknown"
    return _ids_reason(record, rebuilt) or _media_reason(rebuilt, rules) or _distribution_reason(record)


def _ids_reason(record: CallRecord, rebuilt: Rebuilt) -> str | None:
    usage, sampled, prompt_tokens = record.usage, len(record.sampled_ids), rebuilt.prompt_tokens
    if usage is not None and (usage.prompt_tokens, usage.completion_tokens) != (prompt_tokens, sampled):
        return "ids_incomplete"
    if sampled == 0:
        return "empty_completion"
    if prompt_tokens == 0:
        return "empty_prompt"  # the first token would have no position that predicts it
    return "ids_invalid" if rebuilt.invalid_ids else None


def _media_reason(rebuilt: Rebuilt, rules: UsabilityRules) -> str | None:
    if rebuilt.media_messages > rebuilt.media_parts:
        return "media_missing"  # placeholder ids without the picture are another context
    return "media_untrained" if rebuilt.media_parts and not rules.trains_media else None


def _distribution_reason(record: CallRecord) -> str | None:
    if record.logprobs_mode != _TRAINER_LOGPROBS:
        return "logprob_semantics"
    temperature = temperature_of(record, default=1.0)
    return None if math.isfinite(temperature) and temperature > 0 else "constrained_sampling"


def temperature_of(record: CallRecord, *, default: float) -> float:
    """The temperature that was used; NaN where it is no number."""
    temperature = record.sampling_used.get("temperature", default)
    try:
        return float(temperature) if isinstance(temperature, (int, float)) else math.nan
    except OverflowError:
        return math.nan


def media_parts(message: Mapping[str, Any]) -> int:
    """Parts of a message (canonical chat form) that are no text."""
    content = message.get("content")
    if not isinstance(content, list):
        return 0
    return sum(
        isinstance(part, Mapping) and str(part.get("type", "text")) not in ("text", "refusal")
        for part in content
    )


def bad_logprobs(logprobs: FloatColumn) -> list[int]:
    """Indexes whose log-prob is NaN, infinite, above 0 or a placeholder: masked tokens."""
    values = np.frombuffer(logprobs.data, dtype="<f4")
    good = (values <= 0) & (values > _LOGPROB_FLOOR)  # NaN is neither
    return [] if np.logical_and.reduce(good) else np.flatnonzero(~good).tolist()


@dataclass(slots=True)
class Attempt:
    """A call as the retry rule sees it."""

    seq: int
    same_as: tuple[object, ...]
    """Equal for calls with equal thread, request, prompt and choice index."""
    open_calls: tuple[int, ...]
    """seqs in flight when it was dispatched."""
    delivered: bool
    usable: bool
    """Nothing in its own record speaks against it."""


def orphan_retries(attempts: Sequence[Attempt], is_continued: Callable[[int], bool]) -> set[int]:
    """seqs of usable calls that another attempt at the same request replaced.

    Equal requests are one logical call when the later one was dispatched while the earlier was
    in flight or after the earlier was not delivered. The attempt whose ids another call
    continues counts (`is_continued(seq)`), else the last one.
    """
    by_request: dict[tuple[object, ...], list[Attempt]] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.seq):
        by_request.setdefault(attempt.same_as, []).append(attempt)
    orphans: set[int] = set()
    for equals in by_request.values():
        for logical in _logical_calls(equals) if len(equals) > 1 else ():
            candidates = [attempt.seq for attempt in logical if attempt.usable]
            if len(candidates) > 1:
                continued = [seq for seq in candidates if is_continued(seq)]
                orphans |= set(candidates) - {(continued or candidates)[-1]}
    return orphans


def _logical_calls(equals: Sequence[Attempt]) -> list[list[Attempt]]:
    """Attempts at equal requests, in order of seq, joined where one is a retry of another."""
    joined_to: dict[int, int] = {}
    """seq → a seq of the same logical call; a call is named by the one that names itself."""
    lost: int | None = None
    """An attempt that was not delivered: whatever follows is a retry of it."""

    def name(seq: int) -> int:
        while joined_to[seq] != seq:
            joined_to[seq] = seq = joined_to[joined_to[seq]]
        return seq

    for attempt in equals:
        joined_to[attempt.seq] = attempt.seq
        for earlier in attempt.open_calls if lost is None else (*attempt.open_calls, lost):
            if earlier in joined_to:
                joined_to[name(earlier)] = name(attempt.seq)
        if not attempt.delivered:
            lost = attempt.seq
    calls: dict[int, list[Attempt]] = {}
    for attempt in equals:
        calls.setdefault(name(attempt.seq), []).append(attempt)
    return list(calls.values())
