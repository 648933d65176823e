"""Reasoning that a harness carries for us without reading it.

Three protocols have an opaque field for it (`encrypted_content`, `signature`, `thoughtSignature`),
and their harnesses bring it back although some drop the visible text. Nothing is secret here:
the field holds the text, so that nothing need be remembered between calls.
"""

import base64
import binascii
from typing import Any

_MARK = b"polar1"
"""Names the format; a value that does not begin with it is another provider's."""
_PREFIX = base64.b64encode(_MARK).decode()
_URL_SAFE = str.maketrans("-_", "+/")


def seal(text: str) -> str:
    """The opaque form: base64, since Google's clients decode it, and encode it again URL-safe."""
    return base64.b64encode(_MARK + text.encode("utf-8", "replace")).decode()


def unseal(value: Any) -> str:
    """The text, empty where the value is none of ours."""
    if not isinstance(value, str) or not value.startswith(_PREFIX):
        return ""
    padded = value.translate(_URL_SAFE) + "=" * (-len(value) % 4)
    try:
        return base64.b64decode(padded, validate=True)[len(_MARK) :].decode()
    except (binascii.Error, ValueError):
        return ""
