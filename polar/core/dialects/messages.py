"""Anthropic Messages: requests. Conversations are in `messages_input`, answers in `messages_answer`.

Tools whose loading is deferred are offered once a tool's result refers to them; tools that
Anthropic's servers run, or whose schema only their models know, are left out with a note.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from polar.core.dialects.base import AskedTool, DialectName, Headers, ModelRequest
from polar.core.dialects.body import RequestError, body_digest, load_object, read_field
from polar.core.dialects.canonical import function_tool
from polar.core.dialects.engine_answer import Captured
from polar.core.dialects.engine_body import EFFORTS, is_constrained
from polar.core.dialects.errors import ApiError
from polar.core.dialects.messages_answer import MessageEvents, error_object, event, whole_message
from polar.core.dialects.messages_input import BILLING, Conversation
from polar.core.dialects.native_ids import kind_of, native_ids, thread_of

_CHAT_NAMES: Mapping[str, str] = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
}
_EPOCH = "1970-01-01T00:00:00Z"
"""Anthropic's word for a model whose date is not known."""


class MessagesDialect:
    """See the module."""

    name: DialectName = "messages"
    keep_alive = event("ping", {"type": "ping"})

    def parse_request(self, raw: bytes, headers: Headers, target: str = "") -> ModelRequest:
        """Read a body. Raises RequestError."""
        del target
        body = load_object(raw)
        conversation = Conversation()
        conversation.take_system(body.get("system"))
        given = body.get("messages")
        if not isinstance(given, list) or not given:
            raise RequestError("messages must be a list with at least one message", "messages")
        for index, message in enumerate(given):
            conversation.take(message, f"messages[{index}]")
        tools = _Tools(conversation)
        for index, tool in enumerate(read_field(body, "tools", list, [])):
            tools.take(tool, f"tools[{index}]")
        thinking = read_field(body, "thinking", dict, {})
        choice = read_field(body, "tool_choice", dict, {})
        fields = _fields(body, thinking, choice)
        if _is_prefill(conversation.messages[-1]):
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        ids = _native_ids(body, headers, conversation)
        return ModelRequest(
            dialect="messages",
            fields=fields,
            messages=tuple(conversation.messages),
            tools=tuple(tools.functions),
            model=read_field(body, "model", str, ""),
            stream=read_field(body, "stream", bool, default=False),
            single_tool_call=choice.get("disable_parallel_tool_use") is True,
            constrained=is_constrained(fields),
            digest=body_digest(raw),
            native_ids=ids,
            thread_id=thread_of(ids),
            kind=kind_of(ids),
            notes=(*conversation.notes, *tools.notes),
            asked_tools=tools.asked,
            echoed={"omits_thinking": thinking.get("display") == "omitted"},
        )

    def answer(self, request: ModelRequest, body: dict[str, Any], captured: Captured) -> bytes:
        """See Dialect."""
        return orjson.dumps(whole_message(request, body, captured))

    def stream(self, request: ModelRequest, captured: Captured) -> MessageEvents:
        """See Dialect."""
        return MessageEvents(request, captured)

    def error(self, error: ApiError) -> bytes:
        """See Dialect."""
        return orjson.dumps(error_object(error))

    def counted(self, tokens: int) -> bytes:
        """See Dialect."""
        return orjson.dumps({"input_tokens": tokens})

    def models(self, name: str, created: int) -> bytes:
        """See Dialect."""
        del created
        return orjson.dumps({"data": [_model(name)], "has_more": False, "first_id": name, "last_id": name})

    def model(self, name: str, created: int) -> bytes:
        """See Dialect."""
        del created
        return orjson.dumps(_model(name))


class _Tools:
    def __init__(self, conversation: Conversation) -> None:
        self.functions: list[dict[str, Any]] = []
        self.asked: dict[str, AskedTool] = {}
        self.notes: list[str] = []
        self._referenced = conversation.referenced

    def take(self, tool: Any, where: str) -> None:
        if not isinstance(tool, dict):
            raise RequestError(f"{where} must be an object", where)
        name = tool.get("name")
        if tool.get("type") not in (None, "custom"):
            self.notes.append(f"{where}: the tool {tool['type']} is not offered to the model")
            return
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}.name must be text", f"{where}.name")
        if tool.get("defer_loading") and name not in self._referenced:
            return
        self.functions.append(
            function_tool(
                name, tool.get("description"), tool.get("input_schema"), strict=tool.get("strict") or None
            )
        )
        if tool.get("eager_input_streaming"):
            self.asked[name] = AskedTool("function", name, is_eager=True)


def _fields(
    body: Mapping[str, Any], thinking: Mapping[str, Any], choice: Mapping[str, Any]
) -> dict[str, Any]:
    """Sampling, limits and constraints under chat's names."""
    fields = {chat: body[name] for name, chat in _CHAT_NAMES.items() if body.get(name) is not None}
    if choice.get("disable_parallel_tool_use") is True:
        fields["parallel_tool_calls"] = False
    config = read_field(body, "output_config", dict, {})
    effort = "none" if thinking.get("type") == "disabled" else config.get("effort")
    if effort == "none" or (effort in EFFORTS and thinking.get("type") in ("adaptive", "enabled")):
        fields["reasoning_effort"] = effort
    shape = config.get("format") or body.get("output_format")
    if shape is not None:
        if not isinstance(shape, dict) or not isinstance(shape.get("schema"), dict):
            raise RequestError(
                "output_config.format must be json_schema with a schema", "output_config.format"
            )
        schema = {"name": "answer", "schema": shape["schema"]}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    chosen = _tool_choice(choice)
    if chosen is not None:
        fields["tool_choice"] = chosen
    return fields


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    """Chat's tool choice; none where the model is free."""
    kind, name = choice.get("type", "auto"), choice.get("name")
    if kind == "tool" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}
    words = {"auto": None, "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in words:
        raise RequestError("tool_choice.type must be auto, any, none, or tool with a name", "tool_choice")
    return words[kind]


def _is_prefill(message: Mapping[str, Any]) -> bool:
    """The last message is the beginning of the answer."""
    return message["role"] == "assistant" and "tool_calls" not in message


def _native_ids(body: Mapping[str, Any], headers: Headers, conversation: Conversation) -> dict[str, str]:
    """Ids in the body: the metadata, and the header that stands as a block of the system prompt."""
    ids: dict[str, Any] = {BILLING.rstrip(":"): conversation.billing}
    user = read_field(body, "metadata", dict, {}).get("user_id")
    if isinstance(user, str):
        try:
            known = orjson.loads(user)
        except orjson.JSONDecodeError:
            known = None
        if isinstance(known, dict):
            ids["session_id"] = known.get("session_id")
        else:
            ids["user_id"] = user
    return native_ids(headers, ids)


def _model(name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": _EPOCH,
        "lifecycle": "active",
    }
