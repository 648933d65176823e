"""Which calls may be trained, and why the others may not.

Every call gets at most one reason, decided from the record alone, except `orphan_retry`, which
needs the whole session. A bad log-prob masks its token, never its call.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.calls import CallRecord, Delivery

TRAIN_KINDS = frozenset({"agent", "subagent", "compaction"})
"""Kinds of calls that are trained; `auxiliary` (titles, routing) is kept as context only."""

_ORDINARY_FINISH = frozenset({"stop", "length", "tool_calls"})
_LOGPROB_FLOOR = -9999.0
"""Engines write this where they have no log-prob."""
_TRAINER_LOGPROBS = "processed_logprobs"
"""The only meaning that equals the trainer's log-softmax of logits / temperature."""


@dataclass(frozen=True, slots=True)
class UsabilityRules:
    """What a deployment trains."""

    train_kinds: frozenset[str] = TRAIN_KINDS


def own_reason(
    record: CallRecord,
    rules: UsabilityRules,
    *,
    prompt_tokens: int,
    has_media: bool = False,
    session_trainable: bool = True,
) -> str | None:
    """Reason, seen in the call alone, why no token of it may be trained; or None.

    `prompt_tokens`: length of the rebuilt prompt. `has_media`: a message of its whole history
    holds something else than text.
    """
    if record.untrainable is not None:
        return record.untrainable
    if not session_trainable:
        return "session_untrainable"
    if record.kind not in rules.train_kinds:
        return "auxiliary"
    if record.delivery is not Delivery.DELIVERED:
        return record.delivery.value
    finish = record.finish_reason
    if finish not in _ORDINARY_FINISH:
        return f"finish_{finish}" if finish in ("abort", "error") else "finish_unknown"
    ids_reason = _ids_reason(record, prompt_tokens)
    if ids_reason is None and has_media:
        return "media_missing"  # a record carries ids only: the picture behind them is not there
    return ids_reason or _distribution_reason(record)


def _ids_reason(record: CallRecord, prompt_tokens: int) -> str | None:
    usage, sampled = record.usage, len(record.sampled_ids)
    if usage is not None and (usage.prompt_tokens, usage.completion_tokens) != (prompt_tokens, sampled):
        return "ids_incomplete"
    if sampled == 0:
        return "empty_completion"
    if prompt_tokens == 0:
        return "empty_prompt"  # the first token would have no position that predicts it
    return None


def _distribution_reason(record: CallRecord) -> str | None:
    if record.logprobs_mode != _TRAINER_LOGPROBS:
        return "logprob_semantics"
    temperature = record.sampling_used.get("temperature", 1.0)
    valid = isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature > 0
    return None if valid else "constrained_sampling"


def has_media(message: Mapping[str, Any]) -> bool:
    """Whether a message (canonical chat form) holds a part that is no text."""
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and str(part.get("type", "text")) not in ("text", "refusal")
        for part in content
    )


def bad_logprobs(logprobs: Iterable[float]) -> list[int]:
    """Indexes whose log-prob is NaN, infinite, above 0 or a placeholder: masked tokens."""
    return [
        index
        for index, value in enumerate(logprobs)
        if not math.isfinite(value) or value > 0 or value <= _LOGPROB_FLOOR
    ]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call as the retry rule sees it."""

    seq: int
    same_as: tuple[object, ...]
    """Equal for calls with equal thread, request, prompt and choice index."""
    open_calls: frozenset[int]
    """seqs in flight when it was dispatched."""
    delivered: bool
    usable: bool
    """Nothing in its own record speaks against it."""


def orphan_retries(attempts: Sequence[Attempt], is_continued: Callable[[int, set[int]], bool]) -> set[int]:
    """seqs of usable calls that another attempt at the same request replaced.

    Equal requests are one logical call when the later one was dispatched while the earlier was
    in flight or after the earlier was not delivered. The attempt whose ids another call
    continues counts (`is_continued(seq, seqs of the logical call)`), else the last one.
    """
    by_request: dict[tuple[object, ...], list[Attempt]] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.seq):
        by_request.setdefault(attempt.same_as, []).append(attempt)
    orphans: set[int] = set()
    for equals in by_request.values():
        for logical in _logical_calls(equals):
            seqs = {attempt.seq for attempt in logical}
            candidates = [attempt.seq for attempt in logical if attempt.usable]
            if len(candidates) > 1:
                continued = [seq for seq in candidates if is_continued(seq, seqs)]
                orphans |= set(candidates) - {(continued or candidates)[-1]}
    return orphans


def _logical_calls(equals: Sequence[Attempt]) -> list[list[Attempt]]:
    """Attempts at equal requests, in order of seq, joined where one is a retry of another."""
    calls: list[list[Attempt]] = []
    for attempt in equals:
        joined = [
            call
            for call in calls
            if any(earlier.seq in attempt.open_calls or not earlier.delivered for earlier in call)
        ]
        rest = [call for call in calls if call not in joined]
        merged = sorted((a for call in joined for a in call), key=lambda a: a.seq)
        calls = [*rest, [*merged, attempt]]
    return calls
