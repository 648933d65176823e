"""A planned call with its answer, as the next request will look for it."""

from collections.abc import Mapping
from typing import Any

import orjson
from msgspec.structs import replace

from polar.core.chat_template import Message
from polar.core.continuity import spelling
from polar.core.continuity_table import KnownCall
from polar.core.message_marks import answer_mark
from polar.core.rendering import thinks
from polar.core.token_text import TokenText

_LONG = 40
"""Characters from which on a text is not said twice by chance."""
_KEPT = 120
_MAX_TEXTS = 8


def answered(
    known: KnownCall,
    seq: int,
    answer: Message,
    *,
    is_whole: bool,
    has_reasoning: bool,
    call_ids: bool,
    finish_reason: str | None,
    stop_reason: Any,
    prompt: TokenText,
    sampled_tokens: int,
) -> KnownCall:
    """A planned call that has its number and its answer.

    `answer`: the assistant message as delivered. `is_whole`: it came to its end, with all its tool
    calls. `has_reasoning`: with some that was hidden, too. `call_ids`: ids of tool calls are part
    of what the model sees. `prompt`: as far as its ids are known.
    """
    calls = answer.get("tool_calls") or ()
    is_inline = not has_reasoning and thinks(answer)
    return replace(
        known,
        seq=seq,
        answer=answer_mark({**answer, "role": "assistant"}, call_ids=call_ids) if is_whole else None,
        spelling=spelling(answer),
        call_ids=tuple(str(call.get("id")) for call in calls),
        call_names=tuple(str((call.get("function") or {}).get("name")) for call in calls),
        has_reasoning=has_reasoning or is_inline,
        is_inline=is_inline,
        finish_reason=finish_reason,
        stop_reason=stop_reason if isinstance(stop_reason, (str, int)) else None,
        said=_said(answer),
        prompt_tokens=len(prompt),
        prompt_size=len(prompt.text),
        sampled_tokens=sampled_tokens,
    )


def _said(answer: Message) -> tuple[str, ...]:
    calls = answer.get("tool_calls")
    if not calls:
        content = answer.get("content")
        texts = [content] if isinstance(content, str) else []
    else:
        texts = [text for call in calls for text in _texts((call.get("function") or {}).get("arguments"))]
    return tuple(stripped[:_KEPT] for text in texts if len(stripped := text.strip()) >= _LONG)[:_MAX_TEXTS]


def _texts(arguments: Any) -> list[str]:
    """The texts among a call's arguments."""
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return []
    if not isinstance(arguments, Mapping):
        return []
    return [value for value in arguments.values() if isinstance(value, str)]
