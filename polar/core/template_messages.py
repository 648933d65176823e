"""Canonical messages and tools as an engine hands them to a chat template.

vLLM rewrites a request before it renders it; a local rendering is equal only when it does the
same: role `developer` becomes `system` and moves to the front where the template does not know
it, arguments become mappings (`{}` where they are none), reasoning goes by two names, tools carry
exactly the fields of vLLM's own model of a tool.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from polar.core.chat_template import Message, RenderedTool

_BILLING_HEADER = "x-anthropic-billing-header"
"""vLLM drops this line from system texts: it changes with every request of its harness."""


def is_text_only(messages: Sequence[Message]) -> bool:
    """Whether every content is text; whatever else there is only the engine can render."""
    return all(isinstance(message.get("content") or "", str) for message in messages)


def conversation(messages: Sequence[Message], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Text-only messages as the template gets them; new objects, the given ones stay as they are."""
    converted = [template_message(message) for message in messages]
    if knows_developer or all(message["role"] != "developer" for message in converted):
        return converted
    for message in converted:
        if message["role"] == "developer":
            message["role"] = "system"
            message.pop("tools", None)
    return _system_first(converted)


def template_message(message: Message) -> dict[str, Any]:
    """One message; see the module."""
    role = message["role"]
    content = message.get("content") or ""
    if role == "system" and content.startswith(_BILLING_HEADER):
        content = content.partition("\n")[2]
    out: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        if message.get("tool_calls"):
            out["tool_calls"] = [_template_call(call) for call in message["tool_calls"]]
        reasoning = message.get("reasoning")
        if reasoning is not None:
            out["reasoning"] = out["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            out["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        out["tools"] = message.get("tools")
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    return out


def template_tool(tool: Mapping[str, Any]) -> RenderedTool:
    """A function tool with vLLM's fields, in its order."""
    function = tool.get("function") or {}
    named: dict[str, Any] = {
        "name": function.get("name"),
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        named["strict"] = function["strict"]
    out: dict[str, Any] = {"type": "function", "function": named}
    deferred = tool.get("defer_loading")
    inner = function.get("defer_loading")
    if inner is not None or deferred is not None:
        named["defer_loading"] = deferred if inner is None else inner
    if deferred is not None:
        out["defer_loading"] = deferred
    return RenderedTool(out)


def template_options(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """A chat request's template options; None when it asks for what only the engine can render."""
    if (
        fields.get("continue_final_message")
        or fields.get("documents")
        or fields.get("add_generation_prompt") is False
    ):
        return None
    asked = fields.get("chat_template_kwargs") or {}
    if not isinstance(asked, Mapping):
        return None
    options = dict(asked)
    effort = fields.get("reasoning_effort")
    if effort is not None:
        options["reasoning_effort"] = effort
        options.setdefault("enable_thinking", effort != "none")
    return options


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    function["arguments"] = _mapping(function.get("arguments"))
    return {**call, "function": function}


def _mapping(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system messages as one at the front; as they are when there is only the first."""
    system = [message for message in messages if message["role"] == "system"]
    if messages[0]["role"] == "system" and len(system) == 1:
        return messages
    text = "\n\n".join(message["content"] for message in system if message["content"])
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": text}, *rest]
