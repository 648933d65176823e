"""Packed columns: token ids as little-endian int32, log-probs as little-endian float32.

On the wire a column is one base64 string; in memory it is an immutable sequence over its
bytes. `numpy.frombuffer(column.data, "<i4")` (or `"<f4"`) reads it without a copy.
32,768 tokens cost 0.39 MB instead of 0.92 MB as JSON lists.
"""

import base64
import binascii
import contextlib
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar, cast, overload

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

Number = TypeVar("Number", int, float)
_ITEM_BYTES = 4


class Column(Sequence[Number], Generic[Number]):
    """An immutable sequence of 4-byte numbers over little-endian bytes."""

    typecode: ClassVar[str]
    dtype: ClassVar[str]
    __slots__ = ("data",)

    data: bytes
    """The packed little-endian bytes, 4 per item."""

    def __init__(self, values: Iterable[Number] = ()) -> None:
        if self.typecode == "i" and isinstance(values, (list, tuple)):
            # Twice as fast as an array, and as strict; that says what is wrong.
            with contextlib.suppress(struct.error):
                self.data = struct.pack(f"<{len(values)}i", *values)
                return
        packed: array[Any] = array(self.typecode, values)
        if sys.byteorder == "big":
            packed.byteswap()
        self.data = packed.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Wrap packed bytes. Raises ValueError when the length is no multiple of 4."""
        if len(data) % _ITEM_BYTES:
            raise ValueError(f"{len(data)} bytes do not hold whole 4-byte items")
        column = cls.__new__(cls)
        column.data = bytes(data)
        return column

    def tolist(self) -> list[Number]:
        """The items as a Python list."""
        items: array[Any] = array(self.typecode)
        items.frombytes(self.data)
        if sys.byteorder == "big":
            items.byteswap()
        return cast("list[Number]", items.tolist())

    def __len__(self) -> int:
        return len(self.data) // _ITEM_BYTES

    @overload
    def __getitem__(self, index: int) -> Number: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Number | Self:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self.from_bytes(self.data[start * _ITEM_BYTES : max(start, stop) * _ITEM_BYTES])
            return type(self)(self.tolist()[index])
        size = len(self)
        if not -size <= index < size:
            raise IndexError(index)
        at = (index % size) * _ITEM_BYTES
        item: array[Any] = array(self.typecode)
        item.frombytes(self.data[at : at + _ITEM_BYTES])
        if sys.byteorder == "big":
            item.byteswap()
        return cast("Number", item[0])

    def __iter__(self) -> Iterator[Number]:
        return iter(self.tolist())

    def __add__(self, other: Self) -> Self:
        return self.from_bytes(self.data + other.data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Column) and type(other) is type(self) and self.data == other.data

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.data))

    def __repr__(self) -> str:
        head = ", ".join(map(str, self[:6].tolist()))
        return f"{type(self).__name__}[{len(self)}]({head}{', …' if len(self) > 6 else ''})"

    @classmethod
    def _validate(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            try:
                return cls.from_bytes(base64.b64decode(value, validate=True))
            except binascii.Error as error:
                raise ValueError(f"column is not base64: {error}") from error
        if isinstance(value, (list, tuple)):
            try:
                return cls(value)
            except (TypeError, OverflowError) as error:
                raise ValueError(f"column items: {error}") from error
        raise ValueError(f"a column is a base64 string or a list, not {type(value).__name__}")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda column: base64.b64encode(column.data).decode("ascii"),
                when_used="json",
                return_schema=core_schema.str_schema(),
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "type": "string",
            "contentEncoding": "base64",
            "description": f"packed little-endian {cls.dtype} column, 4 bytes an item",
        }


class TokenColumn(Column[int]):
    """Token ids (or other int32 values): shape [n], little-endian int32."""

    typecode = "i"
    dtype = "int32"
    __slots__ = ()


class FloatColumn(Column[float]):
    """Log-probs (natural logarithm) or other float32 values: shape [n]. NaN = not given."""

    typecode = "f"
    dtype = "float32"
    __slots__ = ()
