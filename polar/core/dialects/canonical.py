"""Messages in canonical chat form (see ModelRequest), from chat's own and for other dialects.

Equal conversations give equal messages however a harness spells them: content as text or as
text parts, null, empty or absent, `reasoning` under either name, with or without cache marks.
"""

from collections.abc import Sequence
from typing import Any

from polar.core.dialects.body import RequestError

_TEXT_TYPES = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_NO_CONTENT = frozenset(
    {"cache_control", "provider_specific_fields", "annotations", "refusal", "reasoning_content"}
)
"""Fields of messages that no template reads, or that have another canonical name."""


def canonical_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A chat message in canonical form; `where` names it in errors. Raises RequestError."""
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{where}.role must be a string", f"{where}.role")
    content = message.get("content")
    if len(message) == 2 and isinstance(content, str):
        return message
    out = {name: value for name, value in message.items() if value is not None and name not in _NO_CONTENT}
    out["content"] = canonical_content(content, f"{where}.content")
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning:
        out["reasoning"] = reasoning
    else:
        out.pop("reasoning", None)
    if not out.get("tool_calls", True):
        del out["tool_calls"]
    return out


def canonical_content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Text, or chat's parts where there is more than text. Raises RequestError."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of parts", where)
    return joined([_canonical_part(part, f"{where}[{index}]") for index, part in enumerate(content)])


def joined(parts: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Texts and chat parts as one content: text joined by line ends if there is only text."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def function_tool(name: str, description: Any, parameters: Any, *, strict: Any = None) -> dict[str, Any]:
    """A function tool in chat's form, with the fields that were given."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in an assistant message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def image_part(url: str) -> dict[str, Any]:
    """An image in chat's form; `url` may be a data URI."""
    return {"type": "image_url", "image_url": {"url": url}}


def data_uri(media_type: Any, data: Any) -> str:
    """Inline base64 data as a URL."""
    return f"data:{media_type};base64,{data}"


def _canonical_part(part: Any, where: str) -> str | dict[str, Any]:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RequestError(f"{where} must be an object", where)
    kind = part.get("type")
    if kind in _TEXT_TYPES or kind == "refusal":
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        if not isinstance(text, str):
            raise RequestError(f"{where}.text must be text", f"{where}.text")
        return text
    if "cache_control" in part:
        return {name: value for name, value in part.items() if name != "cache_control"}
    return part
