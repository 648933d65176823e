"""An engine's answer as a Python value, without an object for every number in it.

Of 60 KB that vLLM says to a call, 58 KB are ids and log-probs. Prompt ids are cut out and stay text
(TokenText); log-probs are cut out and read for their numbers only (Logprobs). What is written in
another way than vLLM's is not found, and read as plain JSON like everything else.
"""

import math
from typing import Any

import msgspec
import orjson

from polar.core.token_text import TokenText

_NO_LOGPROB = -9999.0
"""vLLM's word for minus infinity or for a token without a log-prob."""

# A quote inside a JSON text has a backslash before it, so these stand nowhere but between values.
_IDS = b'"prompt_token_ids":'
_FIRST_BYTES = 64
"""Of a list with spaces between its items one is found here."""
_LOGPROBS = b'"logprobs":'
_LOGPROBS_BEGIN = b'"logprobs":{"content":[{'
_LOGPROBS_END = b'}]},"'


class Logprobs(list[float]):
    """Log-probs of sampled tokens, in the place of vLLM's entries; NaN where there is none."""


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None = None


class _Entries(msgspec.Struct, gc=False):
    content: list[_Entry]


_entries = msgspec.json.Decoder(_Entries)


def load_answer(data: bytes) -> Any:
    """The answer or chunk. Raises ValueError where it is no JSON, or none that can be taken apart."""
    ids, data = _cut_ids(data)
    logprobs, data = _cut_logprobs(data)
    body = orjson.loads(data)
    if ids is not None:
        _put(body, "prompt_token_ids", 0, ids)
    if logprobs:
        for choice in body["choices"]:
            position = choice.get("logprobs")
            if isinstance(position, int):
                _put(choice, "logprobs", position, logprobs[position])
                logprobs[position] = Logprobs()
        if any(logprobs):
            raise ValueError("log-probs stand outside of choices")
    return body


def clean(logprob: Any) -> float:
    """A log-prob as it is kept: NaN for what is none."""
    if isinstance(logprob, (int, float)) and _NO_LOGPROB < logprob < math.inf:
        return float(logprob)
    return math.nan


def _cleaned(values: list[float | None]) -> Logprobs:
    """See `clean`; mostly there is nothing to clean, which is seen at once."""
    given = [value for value in values if value is not None]
    all_good = min(given, default=0.0) > _NO_LOGPROB and max(given, default=0.0) < math.inf
    return Logprobs(given if all_good and len(given) == len(values) else map(clean, values))


def _cut_ids(data: bytes) -> tuple[TokenText | None, bytes]:
    begin = data.find(_IDS + b"[")
    end = data.find(b"]", begin)
    if begin < 0 or end < 0 or b" " in data[begin : min(end, begin + _FIRST_BYTES)]:
        return None, data
    ids = TokenText(data[begin + len(_IDS) + 1 : end])
    return ids, b"".join((data[:begin], _IDS, b"0", data[end + 1 :]))


def _cut_logprobs(data: bytes) -> tuple[list[Logprobs], bytes]:
    """(log-probs by position, the rest with positions in their places)."""
    found: list[Logprobs] = []
    parts: list[bytes] = []
    at = 0
    while (begin := data.find(_LOGPROBS_BEGIN, at)) >= 0:
        end = data.find(_LOGPROBS_END, begin)
        if end < 0:
            break
        end += len(_LOGPROBS_END) - 2
        values = [entry.logprob for entry in _entries.decode(data[begin + len(_LOGPROBS) : end]).content]
        parts += [data[at:begin], _LOGPROBS, str(len(found)).encode()]
        found.append(_cleaned(values))
        at = end
    return found, b"".join((*parts, data[at:])) if found else data


def _put(place: Any, name: str, position: int, value: Any) -> None:
    if place.get(name) != position or isinstance(place[name], bool):
        raise ValueError(f"{name} stands in another place")
    place[name] = value
