"""Why a call's prompt does not extend what an earlier call held.

Decides what ids, messages, tools and session marks can tell, and says `unknown` where they
cannot. The cause names the first divergence; a cause never influences what is trained.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polar.core.prefix_tree import Tokens, common_prefix
from schemas.trees import Cause

Message = Mapping[str, Any]

_THINK_END = "</think>"
_SHIFT_PROOF = 8
"""Tokens that must agree after shifting by one before a doubled first token is blamed."""
HEAD_TOKENS = _SHIFT_PROOF + 1


@dataclass(frozen=True, slots=True)
class CallView:
    """What is compared of a call."""

    prompt_tokens: int
    head: Tokens
    """[at most HEAD_TOKENS] first ids of prompt and sampled ids."""
    messages: Sequence[Message] | None
    """Whole request history; None where it is not known."""
    answer: Message
    tools_digest: str
    thread_id: str
    kind: str


def classify(call: CallView, against: CallView, index: int, *, compacted_between: bool) -> tuple[Cause, str]:
    """(cause, detail) of the split of `call` from `against`, whose paths agree on `index` tokens.

    `compacted_between`: a summary call of the same thread lies between the two, or is one of them.
    """
    if index == call.prompt_tokens == against.prompt_tokens:
        return "retry", "same prompt again"
    if _is_shifted(call.head[: call.prompt_tokens], against.head, index):
        return "bos", "the first token is doubled or missing on one side"
    if call.thread_id != against.thread_id or (call.kind == "subagent") != (against.kind == "subagent"):
        return "subagent", f"thread {call.thread_id!r} after {against.thread_id!r}"
    if call.kind == "compaction" or compacted_between:
        return "compaction", "a summary call, or the restart after one"
    if call.messages is None or against.messages is None:
        return "unknown", "no text is known"
    if index < against.prompt_tokens:
        if _system(call.messages) != _system(against.messages):
            return "system_changed", ""
        if call.tools_digest != against.tools_digest:
            return "tools_changed", ""
    return _history_cause(call.messages, [*against.messages, against.answer])


def _is_shifted(prompt: Tokens, path: Tokens, index: int) -> bool:
    if index > 1 or len(prompt) < 2 or len(path) < 2:
        return False
    for doubled, single in ((prompt, path), (path, prompt)):
        proof = min(_SHIFT_PROOF, len(doubled) - 1, len(single))
        repeats = index == 0 or doubled[0] == doubled[1]
        if repeats and proof > 1 and common_prefix(doubled[1:], single) >= proof:
            return True
    return False


def _system(messages: Sequence[Message]) -> list[Message]:
    """Leading system messages."""
    leading: list[Message] = []
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        leading.append(message)
    return leading


def _history_cause(now: Sequence[Message], before: Sequence[Message]) -> tuple[Cause, str]:
    """Compare a request with the history that an earlier call left behind."""
    at = next(
        (i for i, (a, b) in enumerate(zip(now, before, strict=False)) if _canonical(a) != _canonical(b)), None
    )
    if at is None:
        if len(now) < len(before):
            return "truncated_history", f"messages from number {len(now)} are gone"
        return "retokenized", "equal messages, other ids"
    where = f"message {at}"
    if _is_suffix_kept(now[at:], before[at:]):
        return "truncated_history", f"earlier messages are gone from {where} on"
    old, new = before[at], now[at]
    if old.get("role") == "tool" and _same_tool_results(now, before, at):
        return "tool_result_reordered", where
    if old.get("role") == "assistant":
        if new.get("role") == "assistant":
            return _answer_cause(new, old), where
        return "truncated_history", f"the answer at {where} is gone"
    if len(now) < len(before):
        return "truncated_history", f"earlier messages are gone from {where} on"
    return "unknown", where


def _is_suffix_kept(now: Sequence[Message], before: Sequence[Message]) -> bool:
    """Whether the end of the old history follows at once: a window slid over it."""
    kept = [_canonical(message) for message in now]
    old = [_canonical(message) for message in before]
    return any(kept[: len(old) - start] == old[start:] for start in range(1, len(old)))


def _same_tool_results(now: Sequence[Message], before: Sequence[Message], at: int) -> bool:
    def block(messages: Sequence[Message]) -> list[str]:
        start, end = at, at
        while start > 0 and messages[start - 1].get("role") == "tool":
            start -= 1
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        return [_canonical(message) for message in messages[start:end]]

    return sorted(block(now)) == sorted(block(before))


def _answer_cause(new: Message, old: Message) -> Cause:
    if _canonical(_without_thinking(new)) == _canonical(_without_thinking(old)):
        return "thinking_stripped"
    plain_new, plain_old = _without_thinking(new), _without_thinking(old)
    if _has_calls(old) and _canonical(_parsed_calls(plain_new)) == _canonical(_parsed_calls(plain_old)):
        return "arguments_reserialized"
    return "assistant_rewritten"


def _has_calls(message: Message) -> bool:
    return bool(message.get("tool_calls"))


def _without_thinking(message: Message) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key not in ("reasoning_content", "reasoning")}
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


def _canonical(message: Message) -> str:
    """Equal for messages that mean the same: absent, null and empty fields are one."""
    filled = {key: value for key, value in message.items() if value not in (None, "", [], {})}
    return json.dumps(filled, sort_keys=True, default=str)
