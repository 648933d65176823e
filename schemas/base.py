"""Bases of the wire models, and their one byte encoding.

Readers ignore unknown fields and writers only add optional ones; a change that breaks a
reader gets a new major `schema_version`, which old readers refuse by name.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson
from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json


class WireModel(BaseModel):
    """A frozen value that travels inside an event."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
        ser_json_inf_nan="strings",
        validate_default=True,
    )


class Event(WireModel):
    """A value that travels alone as one record of a topic."""

    SCHEMA_MAJOR: ClassVar[int] = 1

    type: str
    """Name of the model; the reader picks the model by it."""
    schema_version: int = 1
    """Major version of the model. A reader refuses a newer one (`schema_version`)."""


def canonical_json(value: Any) -> bytes:
    """JSON bytes of plain data: sorted keys, no spaces, UTF-8. Equal data gives equal bytes.

    Total over what harnesses and engines send: a text with half a surrogate pair is written in
    escapes, a float that JSON does not know as the text `NaN`, `Infinity` or `-Infinity`.
    """
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # Half a surrogate pair, a number beyond 64 bits, a key that is no text.
        return json.dumps(_finite(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if b"null" in data and data.count(b"null") != to_json(value, inf_nan_mode="strings").count(b"null"):
        # orjson writes non-finite floats as null.
        return orjson.dumps(_finite(value), option=orjson.OPT_SORT_KEYS)
    return data


def shrunk(data: bytes) -> bytes:
    """The same bytes, for who keeps them: what orjson returns occupies up to 13 times its size."""
    return bytes(memoryview(data))


def _finite(value: Any) -> Any:
    """The same data with non-finite floats as texts, which pydantic reads back as floats."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def encode(model: WireModel) -> bytes:
    """The bytes of a value on the log. A pure function of the value, so digests can cover it."""
    return canonical_json(model.model_dump(mode="json"))


def digest(*parts: bytes) -> str:
    """SHA-256 (hex) over the parts, each preceded by its length so that borders count."""
    pieces: list[bytes] = []
    for part in parts:
        pieces += (len(part).to_bytes(8, "little"), part)
    return hashlib.sha256(b"".join(pieces)).hexdigest()


def digest_of(*models: WireModel) -> str:
    """SHA-256 (hex) over the encodings of values, in order."""
    return digest(*(encode(model) for model in models))
