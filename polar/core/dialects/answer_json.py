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
_IDS_BEGIN = _IDS + b"["
_LONG_IDS = 40_000
"""Bytes from behind in which they are looked for first."""
_FIRST_BYTES = 64
"""Of a list with spaces between its items one is found here."""
_LOGPROBS = b'"logprobs":'
_LOGPROBS_BEGIN = b'"logprobs":{"content":[{'
_LOGPROBS_END = b'}]},"'
_LOGPROBS_SIZE = 3
"""Bytes of the border that belong to the value."""


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


def _read_logprobs(data: bytes) -> Logprobs:
    """The numbers of vLLM's entries, each as `clean` makes it: mostly that changes nothing, which is
    seen at once."""
    values: list[Any] = [entry.logprob for entry in _entries.decode(data).content]
    try:
        all_good = min(values) > _NO_LOGPROB and max(values) < math.inf
    except TypeError:
        all_good = False  # one is null
    return Logprobs(values if all_good else map(clean, values))


def _cut_ids(data: bytes) -> tuple[TokenText | None, bytes]:
    # They are the last of much in vLLM's answers; where they are long, what stands before them is shorter.
    begin = data.rfind(_IDS_BEGIN, -_LONG_IDS)
    begin = data.find(_IDS_BEGIN) if begin < 0 else begin
    end = data.find(b"]", begin)
    if begin < 0 or end < 0 or b" " in data[begin : min(end, begin + _FIRST_BYTES)]:
        return None, data
    ids = TokenText(data[begin + len(_IDS) + 1 : end])
    return ids, b"".join((data[:begin], _IDS, b"0", data[end + 1 :]))


def _cut_logprobs(data: bytes) -> tuple[list[Logprobs], bytes]:
    """(log-probs by position, the rest with positions in their places)."""
    begin, end = data.find(_LOGPROBS_BEGIN), data.rfind(_LOGPROBS_END)
    if begin < 0:
        return [], data
    try:
        # With one choice, as nearly always: from the first border to the last one there is one value.
        at, end = begin + len(_LOGPROBS), end + _LOGPROBS_SIZE
        return [_read_logprobs(data[at:end])], b"".join((data[:at], b"0", data[end:]))
    except msgspec.MsgspecError:
        return _cut_each_logprobs(data)


def _cut_each_logprobs(data: bytes) -> tuple[list[Logprobs], bytes]:
    """The same of several choices."""
    found: list[Logprobs] = []
    parts: list[bytes] = []
    at = 0
    while (begin := data.find(_LOGPROBS_BEGIN, at)) >= 0:
        end = data.find(_LOGPROBS_END, begin)
        if end < 0:
            break
        begin, end = begin + len(_LOGPROBS), end + _LOGPROBS_SIZE
        parts += [data[at:begin], str(len(found)).encode()]
        found.append(_read_logprobs(data[begin:end]))
        at = end
    return found, b"".join((*parts, data[at:]))


def _put(place: Any, name: str, position: int, value: Any) -> None:
    if place.get(name) != position or isinstance(place[name], bool):
        raise ValueError(f"{name} stands in another place")
    place[name] = value
