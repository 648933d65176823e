"""OpenAI Responses: requests. Conversations are in `responses_input`, answers in `responses_answer`.

For the engine every tool is a function: one of a namespace is called namespace__name, a custom tool
has one text argument with its grammar in the description, a local shell its documented action.
Tools that only OpenAI's own servers run (web_search, …) are left out with a note, as are items
that such tools left; items of an unknown type are refused by name, since a history with a hole
would be another conversation. Nothing is stored, so `previous_response_id` is refused too.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from polar.core.dialects.base import AskedTool, DialectName, Headers, ModelRequest
from polar.core.dialects.body import RequestError, body_digest, load_object, read_field
from polar.core.dialects.canonical import function_tool
from polar.core.dialects.engine_answer import Captured
from polar.core.dialects.engine_body import EFFORTS, is_constrained
from polar.core.dialects.native_ids import kind_of, native_ids, thread_of
from polar.core.dialects.openai_shapes import OpenAiShapes
from polar.core.dialects.responses_answer import ResponseEvents, whole_response
from polar.core.dialects.responses_input import CUSTOM_INPUT, LOCAL_SHELL, Conversation, engine_name

_STORED = ("previous_response_id", "conversation", "prompt")
_CHAT_NAMES: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_output_tokens": "max_tokens",
    "user": "user",
}
_SHELL_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "Program and arguments."},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
        "timeout_ms": {"type": "integer"},
        "user": {"type": "string"},
        "working_directory": {"type": "string"},
    },
    "required": ["command"],
}


class ResponsesDialect(OpenAiShapes):
    """See the module."""

    name: DialectName = "responses"

    def parse_request(self, raw: bytes, headers: Headers, target: str = "") -> ModelRequest:
        """Read a body. Raises RequestError."""
        del target
        body = load_object(raw)
        for name in _STORED:
            if body.get(name) is not None:
                raise RequestError(f"{name} cannot be used: nothing is stored, send the whole input", name)
        if body.get("background"):
            raise RequestError("background cannot be used: wait for the answer or stream it", "background")
        conversation = _conversation(body)
        messages = conversation.end()
        if not messages:
            raise RequestError("input must hold at least one message", "input")
        tools = _Tools()
        for index, tool in enumerate(read_field(body, "tools", list, [])):
            tools.take(tool, f"tools[{index}]")
        for index, tool in enumerate(conversation.tools):
            tools.take(tool, f"additional_tools[{index}]")
        single = body.get("parallel_tool_calls") is False
        fields = _fields(body, tools)
        ids = native_ids(headers, {"prompt_cache_key": body.get("prompt_cache_key")})
        return ModelRequest(
            dialect="responses",
            fields=fields,
            messages=messages,
            tools=tuple(tools.functions),
            model=read_field(body, "model", str, ""),
            stream=read_field(body, "stream", bool, default=False),
            single_tool_call=single,
            constrained=is_constrained(fields),
            digest=body_digest(raw),
            native_ids=ids,
            thread_id=thread_of(ids),
            kind=kind_of(ids),
            notes=(*conversation.notes, *tools.notes),
            asked_tools=tools.asked,
            echoed=_echoed(body, single=single),
        )

    def answer(self, request: ModelRequest, body: dict[str, Any], captured: Captured) -> bytes:
        """See Dialect."""
        return orjson.dumps(whole_response(request, body, captured))

    def stream(self, request: ModelRequest, captured: Captured) -> ResponseEvents:
        """See Dialect."""
        return ResponseEvents(request, captured)


class _Tools:
    """The engine's functions, and what they are for the harness."""

    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        self.asked: dict[str, AskedTool] = {}
        self.notes: list[str] = []

    def take(self, tool: Any, where: str, namespace: str = "") -> None:
        if not isinstance(tool, dict):
            raise RequestError(f"{where} must be an object", where)
        kind = tool.get("type", "function")
        if kind == "namespace" and not namespace:
            inside = read_field(tool, "tools", list, [], f"{where}.")
            for index, member in enumerate(inside):
                self.take(member, f"{where}.tools[{index}]", _name(tool, where))
        elif kind == "function":
            name = _name(tool, where)
            self._add(
                AskedTool("function", name, namespace),
                tool.get("description"), tool.get("parameters"), strict=tool.get("strict") or None,
            )  # fmt: skip
        elif kind == "custom":
            self._add(
                AskedTool("custom", _name(tool, where), namespace), _described(tool), _custom_parameters(tool)
            )
        elif kind == LOCAL_SHELL:
            self._add(
                AskedTool("local_shell", LOCAL_SHELL),
                "Run a program on the user's machine.",
                _SHELL_PARAMETERS,
            )
        else:
            self.notes.append(f"{where}: the tool {kind} is not offered to the model")

    def _add(self, asked: AskedTool, description: Any, parameters: Any, *, strict: Any = None) -> None:
        name = engine_name(asked.name, asked.namespace)
        self.functions.append(function_tool(name, description, parameters, strict=strict))
        if asked.kind != "function" or asked.namespace:
            self.asked[name] = asked


def _conversation(body: Mapping[str, Any]) -> Conversation:
    conversation = Conversation()
    if instructions := read_field(body, "instructions", str, ""):
        conversation.take({"role": "system", "content": instructions}, "instructions")
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise RequestError("input must be text or a list of items", "input")
    for index, item in enumerate(given):
        conversation.take(item, f"input[{index}]")
    return conversation


def _name(tool: Mapping[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name must be text", f"{where}.name")
    return name


def _described(tool: Mapping[str, Any]) -> str:
    """A custom tool's description with its grammar: the model has to know it, the engine does not."""
    description = str(tool.get("description") or "")
    format_ = tool.get("format")
    if not isinstance(format_, dict) or format_.get("type") != "grammar":
        return description
    grammar = f"The input follows this {format_.get('syntax')} grammar:\n{format_.get('definition')}"
    return f"{description}\n\n{grammar}" if description else grammar


def _custom_parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    text = {"type": "string", "description": f"The whole input of {tool.get('name')}, as free text."}
    return {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}


def _fields(body: Mapping[str, Any], tools: _Tools) -> dict[str, Any]:
    """Sampling, limits and constraints under chat's names."""
    names = {
        "temperature": "temperature",
        "top_p": "top_p",
        "max_output_tokens": "max_tokens",
        "user": "user",
    }
    fields = {chat: body[name] for name, chat in names.items() if body.get(name) is not None}
    if body.get("parallel_tool_calls") is False:
        fields["parallel_tool_calls"] = False
    effort = read_field(body, "reasoning", dict, {}).get("effort")
    if effort in EFFORTS:
        fields["reasoning_effort"] = effort
    elif effort is not None:
        tools.notes.append(f"reasoning.effort {effort!r} is left out")
    shape = _response_format(read_field(body, "text", dict, {}).get("format"))
    if shape is not None:
        fields["response_format"] = shape
    choice = _tool_choice(body.get("tool_choice"), tools)
    if choice is not None:
        fields["tool_choice"] = choice
    return fields


def _response_format(shape: Any) -> dict[str, Any] | None:
    if shape is None:
        return None
    if not isinstance(shape, dict):
        raise RequestError("text.format must be an object", "text.format")
    kind = shape.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema" or not isinstance(shape.get("schema"), dict):
        raise RequestError(
            "text.format must be text, json_object or json_schema with a schema", "text.format"
        )
    names = ("name", "description", "schema", "strict")
    schema = {name: shape[name] for name in names if shape.get(name) is not None}
    return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}


def _tool_choice(choice: Any, tools: _Tools) -> Any:
    """Chat's tool choice; none where the model is free, which is what chat means without one."""
    if choice is None or choice == "auto":
        return None
    if choice in ("none", "required"):
        return choice
    if isinstance(choice, dict):
        kind, name = choice.get("type"), choice.get("name")
        if kind == "allowed_tools":
            tools.notes.append("tool_choice: all tools stay allowed")
            return "required" if choice.get("mode") == "required" else None
        if kind == LOCAL_SHELL:
            name = LOCAL_SHELL
        if isinstance(name, str):
            namespace = choice.get("namespace")
            flat = engine_name(name, namespace if isinstance(namespace, str) else "")
            return {"type": "function", "function": {"name": flat}}
    raise RequestError(
        "tool_choice must be auto, none, required or name a function or custom tool", "tool_choice"
    )


def _echoed(body: Mapping[str, Any], *, single: bool) -> dict[str, Any]:
    include = body.get("include")
    return {
        "parallel_tool_calls": not single,
        "tool_choice": body.get("tool_choice") or "auto",
        "text": body.get("text") or {"format": {"type": "text"}},
        "metadata": body.get("metadata") or {},
        "seals_reasoning": isinstance(include, list) and "reasoning.encrypted_content" in include,
    }
