"""Reasoning that a harness carries for us without reading it.

Three protocols have an opaque field for it (`encrypted_content`, `signature`, `thoughtSignature`),
and their harnesses bring it back although some drop the visible text. Nothing is secret here:
the field holds the text, so that nothing need be remembered between calls.
"""

import base64
import binascii
from typing import Any

_MARK = "polar1."
"""Names the format; a value without it is another provider's."""


def seal(text: str) -> str:
    """The opaque form."""
    return _MARK + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def unseal(value: Any) -> str:
    """The text, empty where the value is none of ours."""
    if not isinstance(value, str) or not value.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(value[len(_MARK) :], validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        return ""
