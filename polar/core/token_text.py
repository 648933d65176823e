"""Token ids as the JSON text that an engine writes: counted, compared, joined, never a list of numbers.

A prompt of 50,000 ids costs milliseconds as a list of Python's numbers. As text it is compared with
what is known of an earlier call, put into the record and into the next prompt; only sampled ids
are ever read.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
import orjson

_LONG = 4096
"""Bytes from which on the cost of numpy's calls is made up for."""


class TokenText(Sequence[int]):
    """The inside of a JSON list of whole numbers, without spaces. Equal to the list of these numbers."""

    __slots__ = ("_is_sound", "_list", "_size", "text")

    def __init__(self, text: bytes, size: int = -1) -> None:
        """`size`: how many ids these are, where that is known. Whether they are ids is not looked at."""
        self.text = text
        self._list: list[int] | None = None
        self._size = size
        self._is_sound: bool | None = None

    @classmethod
    def of(cls, ids: Sequence[int]) -> "TokenText":
        """The text of numbers. Raises TypeError for what JSON does not know as one."""
        try:
            return cls(orjson.dumps(ids if type(ids) is list else list(ids))[1:-1], len(ids))
        except orjson.JSONEncodeError as error:
            raise TypeError(str(error)) from error

    def tolist(self) -> list[int]:
        """The numbers."""
        if self._list is None:
            self._list = orjson.loads(b"[" + self.text + b"]")
        return self._list

    def followed_by(self, more: "TokenText") -> "TokenText":
        """These ids and then the others."""
        if not self.text or not more.text:
            return more if not self.text else self
        size = -1 if self._size < 0 else self._size + len(more)
        return TokenText(self.text + b"," + more.text, size)

    def begins_with(self, text: bytes) -> bool:
        """Whether the first ids are those of a text."""
        return self.text.startswith(text) and self.text[len(text) : len(text) + 1] in (b"", b",")

    def is_sound(self) -> bool:
        """Whether a record can hold the text: nothing but digits, signs and commas stand in it."""
        if self._is_sound is None:
            self._scan()
        return bool(self._is_sound)

    def __len__(self) -> int:
        if self._size < 0:
            self._scan()
        return self._size

    def _scan(self) -> None:
        """Whether the text is sound, and how many ids it has."""
        commas, self._is_sound = (_scan_long if len(self.text) > _LONG else _scan_short)(self.text)
        self._size = commas + 1 if self.text else 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.tolist()[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenText):
            return self.text == other.text
        return isinstance(other, list) and self.tolist() == other

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"TokenText({self.text!r})"


def _scan_short(text: bytes) -> tuple[int, bool]:
    """(commas, whether nothing else stands there than in ids)."""
    others = text.translate(None, b"0123456789-")
    return others.count(b","), others == b"," * len(others)


def _scan_long(text: bytes) -> tuple[int, bool]:
    """The same, with vector instructions: what ids are made of are the bytes from the comma to the nine,
    but for a dot and a slash."""
    codes = np.frombuffer(text, np.uint8)
    within = bool(codes.min() >= ord(",") and codes.max() <= ord("9"))
    return int(np.count_nonzero(codes == ord(","))), within and b"." not in text and b"/" not in text


def common_prefix(a: bytes, b: bytes) -> int:
    """Bytes of the leading whole ids that two texts share, by bisection over memory compares."""
    if len(a) > len(b):
        a, b = b, a
    low, high = 0, len(a)
    if b.startswith(a):
        low = high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    if low == len(a) and b[low : low + 1] in (b"", b","):
        return low
    return max(0, a.rfind(b",", 0, low))


def sound(ids: Iterable[Any]) -> TokenText | None:
    """Ids as an engine gave them; none when something else than int32 stands among them."""
    if isinstance(ids, TokenText):
        return ids if ids.is_sound() else None
    numbers = list(ids)
    try:
        array("i", numbers)
        text = TokenText.of(numbers)
    except (TypeError, OverflowError):
        return None
    return text if text.is_sound() else None  # true and false stand in arrays, too
