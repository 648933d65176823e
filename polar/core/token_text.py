"""Token ids as the JSON text that an engine wrote: counted, compared, packed, never a list of numbers.

A prompt of 50,000 ids costs milliseconds as a list of Python's numbers. As text it is compared with
what is known of an earlier call, and only the rest is read.
"""

from collections.abc import Sequence
from typing import overload

import numpy as np
import orjson

_ITEM_BYTES = 4
_LEAST, _LARGEST = -(2**31), 2**31 - 1


class TokenText(Sequence[int]):
    """The inside of a JSON list of whole numbers, without spaces. Equal to the list of these numbers."""

    __slots__ = ("_list", "_packed", "_size", "text")

    def __init__(self, text: bytes) -> None:
        """Whether the text holds nothing but ids is seen when they are packed."""
        self.text = text
        self._list: list[int] | None = None
        self._packed: bytes | None = None
        self._size = -1

    @classmethod
    def of(cls, ids: Sequence[int], *, behind: bytes = b"") -> "TokenText":
        """The text of numbers, behind another text."""
        text = orjson.dumps(list(ids))[1:-1]
        return cls(behind + b"," + text if behind and text else behind + text)

    def tolist(self) -> list[int]:
        """The numbers."""
        if self._list is None:
            self._list = orjson.loads(b"[" + self.text + b"]")
        return self._list

    def packed(self, text: bytes = b"", known: bytes = b"") -> bytes:
        """The ids as little-endian int32; `known` are those of a text that this one begins with.

        Raises OverflowError where one does not fit, ValueError for anything but ids.
        """
        if self._packed is None:
            self._packed = known + _pack(self.text[len(text) + 1 :] if text else self.text)
            self._size = len(self._packed) // _ITEM_BYTES
        return self._packed

    def begins_with(self, text: bytes) -> bool:
        """Whether the first ids are those of a text."""
        return self.text.startswith(text) and self.text[len(text) : len(text) + 1] in (b"", b",")

    def __len__(self) -> int:
        if self._size < 0:
            self._size = self.text.count(b",") + 1 if self.text else 0
        return self._size

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


def _pack(text: bytes) -> bytes:
    if not text:
        return b""
    if text.translate(None, b"0123456789,-") or b",," in text:
        raise ValueError("these are no token ids")
    # Numbers beyond 64 bits come out as the largest or smallest of 64 bits.
    numbers = np.fromstring(text, dtype=np.int64, sep=",")
    if numbers.min() < _LEAST or numbers.max() > _LARGEST:
        raise OverflowError("a token id does not fit in 32 bits")
    return numbers.astype("<i4").tobytes()
