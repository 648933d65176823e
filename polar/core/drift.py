"""Why a call's prompt does not extend what an earlier call held.

Decides what token ids, decoded text, messages, tools and session marks can tell, and says
`unknown` where they cannot. The cause names the first divergence; a cause never influences what
is trained.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polar.core.histories import Histories, Message, canonical
from polar.core.prefix_tree import Tokens
from schemas.trees import Cause

Decode = Callable[[Sequence[int]], str]
"""Token ids → text, special tokens included. Total: ids outside the vocabulary give no text."""

SHOWN_TOKENS = 24
"""Tokens on each side of a split whose text is shown."""
HEAD_TOKENS = 9
_SHIFT_PROOF = HEAD_TOKENS - 1
"""Tokens that must agree after shifting by one before a doubled first token is blamed."""
_CUT_TOKENS = 4096
"""Tokens behind a split in which the prompt's continuation is looked for."""
_CUT_PROOF = 4
"""Tokens that must be found again before something is said to be cut out in front of them."""
_TEXT_TOKENS = 64
_THINK_END = "</think>"
_THINKING = ("reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Anchor:
    """A request on the earlier call's path whose prompt ends at or before the split."""

    tokens: int
    """Length of its prompt."""
    sampled: int
    """Length of its answer, which follows."""
    messages: int
    """Number of its messages; the answer is the message with this number."""


@dataclass(frozen=True, slots=True)
class CallView:
    """What is compared of a call."""

    prompt_tokens: int
    head: tuple[int, ...]
    """First ids of prompt and sampled ids, at most HEAD_TOKENS."""
    messages: Sequence[Message] | None
    """Whole request history; None where it is not known."""
    answer: Message
    tools_digest: str
    thread_id: str
    kind: str


@dataclass(frozen=True, slots=True)
class Parting:
    """Two calls whose paths part."""

    call: CallView
    against: CallView
    index: int
    """Tokens on which their paths agree."""
    found: Callable[[int], Tokens]
    """What the call's prompt holds from there on, at most so many tokens."""
    held: Callable[[int], Tokens]
    """What the earlier path holds from there on, at most so many tokens."""
    anchor: Anchor | None
    """The longest such request; none where the split lies in the first prompt of the path."""
    shared_messages: int
    """Leading messages that are known to be equal."""
    compacted_between: bool
    """A summary call of the same thread lies between the two, or is one of them."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Cause of a split."""

    cause: Cause
    detail: str = ""
    message: int | None = None
    """Index of the message of the call's request in which the split falls."""


def diagnose(parting: Parting, histories: Histories, decode: Decode | None = None) -> Diagnosis:
    """The cause, and the message in which the split falls where messages are known."""
    call, against, index = parting.call, parting.against, parting.index
    if index == call.prompt_tokens == against.prompt_tokens:
        return Diagnosis("retry", "same prompt again")
    at, answer = _difference(parting, histories), _answer_at(parting)
    if at is not None and answer is not None and answer < at:
        at = None  # the ids part in an earlier message, which is equal
    where = answer if at is None else at
    if _is_shifted(call.head[: call.prompt_tokens], against.head, index):
        return Diagnosis("bos", "the first token is doubled or missing on one side", where)
    if call.thread_id != against.thread_id or (call.kind == "subagent") != (against.kind == "subagent"):
        return Diagnosis("subagent", f"thread {call.thread_id!r} after {against.thread_id!r}", where)
    if call.kind == "compaction" or parting.compacted_between:
        return Diagnosis("compaction", "a summary call, or the restart after one", where)
    if call.messages is None or against.messages is None:
        if decode is not None and _is_same_text(parting, decode):
            return Diagnosis("retokenized", "equal text, other ids")
        return Diagnosis("unknown", "no text is known")
    if parting.anchor is None:
        if _leading(call.messages, histories) != _leading(against.messages, histories):
            return Diagnosis("system_changed", "", where)
        if call.tools_digest != against.tools_digest:
            return Diagnosis("tools_changed", "", where)
    before = [*against.messages, against.answer]
    if at is None:
        cause, detail = _rendered_otherwise(parting, before, answer, decode)
    else:
        cause, detail = _changed(call.messages, before, at, histories)
    return Diagnosis(cause, detail, where)


def _difference(parting: Parting, histories: Histories) -> int | None:
    now, before = parting.call.messages, parting.against.messages
    if now is None or before is None:
        return None
    return histories.first_difference(now, [*before, parting.against.answer], parting.shared_messages)


def _answer_at(parting: Parting) -> int | None:
    """Index of the earlier answer that the token at the split belongs to; None where it is none."""
    anchor, messages = parting.anchor, parting.call.messages
    if anchor is None or messages is None or parting.index >= anchor.tokens + anchor.sampled:
        return None
    return anchor.messages if anchor.messages < len(messages) else None


def _is_shifted(prompt: Sequence[int], path: Sequence[int], index: int) -> bool:
    if index > 1 or len(prompt) < 2 or len(path) < 2:
        return False
    for doubled, single in ((prompt, path), (path, prompt)):
        proof = min(_SHIFT_PROOF, len(doubled) - 1, len(single))
        repeats = index == 0 or doubled[0] == doubled[1]
        if repeats and proof > 1 and list(doubled[1 : 1 + proof]) == list(single[:proof]):
            return True
    return False


def _leading(messages: Sequence[Message], histories: Histories) -> list[str]:
    """Leading system messages."""
    leading: list[str] = []
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        leading.append(histories.canonical(message))
    return leading


def _rendered_otherwise(
    parting: Parting, before: Sequence[Message], answer: int | None, decode: Decode | None
) -> tuple[Cause, str]:
    """The messages are equal where the ids part; `answer`: in which earlier answer that is."""
    kept = len(parting.call.messages or ())
    is_gone = kept < len(before) - 1 or (kept < len(before) and not len(parting.found(1)))
    if answer is None and is_gone:
        return "truncated_history", f"messages from number {kept} are gone"
    if decode is not None and _is_same_text(parting, decode):
        return "retokenized", "equal text, other ids"
    held = before[answer] if answer is not None else parting.against.answer
    if _thinks(held) and _is_cut_out(parting.found(_CUT_PROOF), parting.held(_CUT_TOKENS)):
        return "thinking_stripped", "the template left the thinking of an earlier answer out"
    return "retokenized", "equal messages, other ids"


def _is_same_text(parting: Parting, decode: Decode) -> bool:
    """Whether both sides go on with the same text, as far as the shorter one goes."""
    found = decode(parting.found(_TEXT_TOKENS).tolist())
    held = decode(parting.held(_TEXT_TOKENS).tolist())
    shorter, longer = sorted((found, held), key=len)
    return bool(shorter) and longer.startswith(shorter)


def _is_cut_out(found: Tokens, held: Tokens) -> bool:
    """Whether the prompt goes on with what the earlier path holds later."""
    if len(found) == 0 or len(held) <= len(found):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(held[1:], len(found))
    return bool((windows == found).all(axis=1).any())


def _changed(
    now: Sequence[Message], before: Sequence[Message], at: int, histories: Histories
) -> tuple[Cause, str]:
    """The message with number `at` is another one."""
    where = f"message {at}"
    if _is_suffix_kept(now[at:], before[at:], histories):
        return "truncated_history", f"earlier messages are gone from {where} on"
    old, new = before[at], now[at]
    if old.get("role") == "tool" and _same_tool_results(now, before, at, histories):
        return "tool_result_reordered", where
    if old.get("role") == "assistant":
        if new.get("role") == "assistant":
            return _answer_cause(new, old), where
        return "truncated_history", f"the answer at {where} is gone"
    if len(now) < len(before):
        return "truncated_history", f"earlier messages are gone from {where} on"
    return "unknown", where


def _is_suffix_kept(now: Sequence[Message], before: Sequence[Message], histories: Histories) -> bool:
    """Whether the end of the old history follows at once: a window slid over it."""
    first = histories.canonical(now[0])
    for start in range(1, len(before)):
        if histories.canonical(before[start]) != first or len(before) - start > len(now):
            continue
        kept = zip(now, before[start:], strict=False)
        if all(histories.is_same(new, old) for new, old in kept):
            return True
    return False


def _same_tool_results(
    now: Sequence[Message], before: Sequence[Message], at: int, histories: Histories
) -> bool:
    def block(messages: Sequence[Message]) -> list[str]:
        start, end = at, at
        while start > 0 and messages[start - 1].get("role") == "tool":
            start -= 1
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        return sorted(histories.canonical(message) for message in messages[start:end])

    return block(now) == block(before)


def _answer_cause(new: Message, old: Message) -> Cause:
    plain_new, plain_old = _without_thinking(new), _without_thinking(old)
    if canonical(plain_new) == canonical(plain_old):
        return "thinking_stripped"
    if old.get("tool_calls") and canonical(_parsed_calls(plain_new)) == canonical(_parsed_calls(plain_old)):
        return "arguments_reserialized"
    return "assistant_rewritten"


def _thinks(message: Message) -> bool:
    content = message.get("content")
    return any(message.get(name) for name in _THINKING) or (
        isinstance(content, str) and _THINK_END in content
    )


def _without_thinking(message: Message) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key not in _THINKING}
    content = plain.get("content")
    if isinstance(content, str) and _THINK_END in content:
        plain["content"] = content.rpartition(_THINK_END)[2].lstrip("\n")
    return plain


def _parsed_calls(message: Message) -> dict[str, Any]:
    """The message with tool-call arguments as data, so that equal JSON compares equal."""
    calls = message.get("tool_calls")
    parsed = [_parsed_call(call) for call in calls] if isinstance(calls, list) else calls
    return {**message, "tool_calls": parsed}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    try:
        data = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        data = {"malformed": arguments}
    return {**call, "function": {**function, "arguments": data}}
