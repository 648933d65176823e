"""JSON bodies of requests: parsed, bounded in depth, read field by field.

Invariant: whatever the bytes are, the outcome is a value of the expected type or a RequestError
that names the field.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
import xxhash

MAX_NESTING = 100
"""Deepest nesting of a request; records nest it a little deeper, and JSON encoders end at 255."""
MAX_CHOICES = 64
_ENCODER_LEVELS = 254
"""Deeper values orjson refuses."""

_T = TypeVar("_T")


class RequestError(ValueError):
    """The body is no request of its dialect; `param` names the field at fault, if it is one field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def load_object(raw: bytes) -> dict[str, Any]:
    """The body as an object. Raises RequestError."""
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("the request body must be a JSON object")
    if _is_too_deep(raw, fields):
        raise RequestError(f"the request body is nested deeper than {MAX_NESTING} levels")
    return fields


def load_value(raw: bytes) -> Any:
    """One value of a body. Raises ValueError, also where it is nested too deep."""
    value = orjson.loads(raw)
    if _is_too_deep(raw, value):
        raise ValueError("nested too deep")
    return value


def body_digest(raw: bytes, *more: bytes) -> str:
    """XXH3 (128 bits, hex) of a body, and of what a URL adds to it: by it equal requests of a session are
    known. Whoever makes two bodies with one digest gets the answer to the first for the second."""
    return xxhash.xxh3_128_hexdigest(b"\0".join((raw, *more)) if more else raw)


def read_field(fields: Mapping[str, Any], name: str, kind: type[_T], default: _T, where: str = "") -> _T:
    """The field, or the default where it is missing or null. Raises RequestError for another type."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RequestError(f"{where}{name} must be a {_WORDS.get(kind, kind.__name__)}", f"{where}{name}")
    return value


def read_objects(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """A list of objects. Raises RequestError."""
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list", name)
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise RequestError(f"{name}[{index}] must be an object", f"{name}[{index}]")
    return tuple(value)


def read_choices(value: Any, name: str) -> int:
    """How many answers are asked for. Raises RequestError."""
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_CHOICES:
        raise RequestError(f"{name} must be a whole number from 1 to {MAX_CHOICES}", name)
    return value


_WORDS: Mapping[type, str] = {str: "text", dict: "JSON object", list: "list", int: "whole number"}


def _is_too_deep(raw: bytes, value: Any) -> bool:
    """Whether lists and objects are nested too deep; orjson finds out, at 255 levels."""
    if raw.count(b"{") + raw.count(b"[") <= MAX_NESTING:
        return False
    for _ in range(_ENCODER_LEVELS - MAX_NESTING):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False
