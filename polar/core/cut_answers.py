"""Which sampled tokens of an answer its harness has seen.

A stop string, a stop token or a limit ends an answer before its closing token. What was sampled
and not delivered stays on its own branch, trained as sampled; a continuation begins behind the
last token whose text was delivered.
"""

from collections.abc import Sequence

from polar.core.rendering import Renderer

_CHARACTER_TOKENS = 4
"""Tokens that the bytes of one character take at most."""
_BROKEN = "�"


def kept_tokens(
    renderer: Renderer, sampled: Sequence[int], finish_reason: str | None, stop_reason: str | int | None
) -> tuple[int, str]:
    """(leading sampled ids whose text was delivered, text delivered of the token behind them)."""
    if not sampled or sampled[-1] == renderer.close_id:
        return len(sampled), ""
    if isinstance(stop_reason, str) and stop_reason:
        return _before(renderer, sampled, stop_reason)
    kept = len(sampled)
    if isinstance(stop_reason, int):
        kept -= 1
    while kept and renderer.encoder.is_special(sampled[kept - 1]):
        kept -= 1
    if finish_reason == "length":
        kept = _whole_characters(renderer, sampled, kept)
    return kept, ""


def _before(renderer: Renderer, sampled: Sequence[int], stop: str) -> tuple[int, str]:
    """Engines keep all tokens up to the end of a stop string, and deliver the text before it."""
    decode = renderer.encoder.decode
    text = decode(sampled)
    end = text.find(stop)
    if end < 0:
        return len(sampled), ""
    low, high = 0, len(sampled)
    while low < high:
        middle = (low + high + 1) // 2
        if len(decode(sampled[:middle])) <= end:
            low = middle
        else:
            high = middle - 1
    while low and not text.startswith(decode(sampled[:low])):
        low -= 1
    return low, text[len(decode(sampled[:low])) : end]


def _whole_characters(renderer: Renderer, sampled: Sequence[int], kept: int) -> int:
    """Without the bytes of a character that the limit cut."""
    for fewer in range(min(_CHARACTER_TOKENS, kept)):
        tail = sampled[max(0, kept - fewer - 2 * _CHARACTER_TOKENS) : kept - fewer]
        if not renderer.encoder.decode(tail).endswith(_BROKEN):
            return kept - fewer
    return kept
