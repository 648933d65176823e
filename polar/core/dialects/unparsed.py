"""Arguments of tool calls in protocols that want a JSON object, though models write any text.

Invariant: what a harness brings back gives the text that the model wrote, if it was no object;
otherwise an equal object.
"""

from typing import Any

import orjson

_UNPARSED = "__unparsedToolInput"
"""Where Claude Code, and this gateway, put arguments that are no JSON object: harnesses check it
against the tool's schema and tell the model."""


def arguments_of(value: Any) -> str:
    """A call's input as the text that the model wrote, or as compact JSON."""
    if isinstance(value, dict) and len(value) == 1:
        unparsed = value.get(_UNPARSED)
        if isinstance(unparsed, dict) and isinstance(unparsed.get("raw"), str):
            return str(unparsed["raw"])
    return orjson.dumps({} if value is None else value).decode()


def input_of(arguments: str) -> orjson.Fragment | dict[str, Any]:
    """A call's arguments as a JSON object: as the model wrote them, or marked where they are none."""
    if not arguments.strip():
        return {}
    try:
        if isinstance(orjson.loads(arguments), dict):
            # Line ends between the values would end an event; inside of texts JSON has none.
            return orjson.Fragment(arguments.replace("\n", " ").replace("\r", " "))
    except orjson.JSONDecodeError:
        pass
    return {_UNPARSED: {"raw": arguments, "len": len(arguments)}}
