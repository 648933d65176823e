"""Google generateContent: requests. Contents are in `google_input`, answers in `google_answer`.

The URL says model and method: an instance of the dialect is for whole answers or for streams, which
are always server-sent events. Tools that Google's servers run are left out with a note; stored
caches are refused, since nothing is stored here.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from polar.core.dialects.base import DialectName, Headers, ModelRequest
from polar.core.dialects.body import RequestError, body_digest, load_object, read_choices, read_field
from polar.core.dialects.canonical import function_tool
from polar.core.dialects.engine_answer import Captured
from polar.core.dialects.engine_body import EFFORTS, is_constrained
from polar.core.dialects.errors import ApiError
from polar.core.dialects.google_answer import GoogleEvents, error_object, whole_response
from polar.core.dialects.google_input import Conversation, camel
from polar.core.dialects.native_ids import kind_of, native_ids, thread_of

_CHAT_NAMES: Mapping[str, str] = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_MODES: Mapping[str, str | None] = {
    "MODE_UNSPECIFIED": None, "AUTO": None, "VALIDATED": None, "ANY": "required", "NONE": "none",
}  # fmt: skip
_TYPES = ("STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL")
_GOOGLE_ONLY = ("nullable", "propertyOrdering")


class GoogleDialect:
    """See the module."""

    name: DialectName = "google"
    keep_alive = b""
    """Gemini CLI throws an answer away that comments or pings came before."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream

    def parse_request(self, raw: bytes, headers: Headers, target: str) -> ModelRequest:
        """Read a body; `target` is the model's name. Raises RequestError."""
        body = camel(load_object(raw))
        if isinstance(body.get("generateContentRequest"), dict):
            body = camel(body["generateContentRequest"])
        if body.get("cachedContent") is not None:
            raise RequestError("cachedContent cannot be used: nothing is stored here", "cachedContent")
        conversation = Conversation()
        conversation.take_system(body.get("systemInstruction"))
        contents = body.get("contents")
        if isinstance(contents, (str, dict)):
            contents = [contents]
        if not isinstance(contents, list) or not contents:
            raise RequestError("contents must be a list with at least one content", "contents")
        for index, content in enumerate(contents):
            conversation.take(content, f"contents[{index}]")
        conversation.end()
        config = camel(read_field(body, "generationConfig", dict, {}))
        thinking = camel(read_field(config, "thinkingConfig", dict, {}, "generationConfig."))
        tools, notes = _tools(read_field(body, "tools", list, []))
        fields = _fields(config, thinking) | _tool_choice(read_field(body, "toolConfig", dict, {}))
        ids = native_ids(headers)
        return ModelRequest(
            dialect="google",
            fields=fields,
            messages=tuple(conversation.messages),
            tools=tuple(tools),
            model=target,
            stream=self._stream,
            choices=read_choices(config.get("candidateCount"), "generationConfig.candidateCount"),
            constrained=is_constrained(fields),
            digest=body_digest(raw, target.encode(), b"stream" if self._stream else b"whole"),
            native_ids=ids,
            thread_id=thread_of(ids),
            kind=kind_of(ids),
            notes=(*conversation.notes, *notes),
            echoed={"shows_thoughts": thinking.get("includeThoughts") is True},
        )

    def answer(self, request: ModelRequest, body: dict[str, Any], captured: Captured) -> bytes:
        """See Dialect."""
        return orjson.dumps(whole_response(request, body, captured))

    def stream(self, request: ModelRequest, captured: Captured) -> GoogleEvents:
        """See Dialect."""
        return GoogleEvents(request, captured)

    def error(self, error: ApiError) -> bytes:
        """See Dialect."""
        return orjson.dumps(error_object(error))

    def counted(self, tokens: int) -> bytes:
        """See Dialect."""
        return orjson.dumps({"totalTokens": tokens})

    def models(self, name: str, created: int) -> bytes:
        """See Dialect."""
        del created
        return orjson.dumps({"models": [_model(name)]})

    def model(self, name: str, created: int) -> bytes:
        """See Dialect."""
        del created
        return orjson.dumps(_model(name))


def _tools(groups: list[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """(functions, notes on what is no function)."""
    functions: list[dict[str, Any]] = []
    notes: list[str] = []
    for index, given in enumerate(groups):
        where = f"tools[{index}]"
        if not isinstance(given, dict):
            raise RequestError(f"{where} must be an object", where)
        group = camel(given)
        declared = read_field(group, "functionDeclarations", list, [], f"{where}.")
        for place, function in enumerate(declared):
            functions.append(_function(function, f"{where}.functionDeclarations[{place}]"))
        notes += [
            f"{where}: the tool {name} is not offered to the model"
            for name in group
            if name != "functionDeclarations"
        ]
    return functions, notes


def _function(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise RequestError(f"{where} must be an object", where)
    function = camel(given)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name must be text", f"{where}.name")
    schema = function.get("parametersJsonSchema")
    if schema is None:
        schema = function.get("parameters")
    return function_tool(name, function.get("description"), _json_schema(schema))


def _fields(config: Mapping[str, Any], thinking: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling, limits and constraints under chat's names."""
    fields = {chat: config[name] for name, chat in _CHAT_NAMES.items() if config.get(name) is not None}
    effort = read_field(thinking, "thinkingLevel", str, "", "generationConfig.thinkingConfig.").lower()
    if thinking.get("thinkingBudget") == 0:
        effort = "none"
    if effort in EFFORTS:
        fields["reasoning_effort"] = effort
    schema = config.get("responseJsonSchema")
    schema = _json_schema(config.get("responseSchema") if schema is None else schema)
    mime = config.get("responseMimeType")
    if mime == "text/x.enum" and isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        fields["structured_outputs"] = {"choice": schema["enum"]}
    elif isinstance(schema, dict):
        shape = {"name": "answer", "schema": schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": shape}
    elif mime == "application/json":
        fields["response_format"] = {"type": "json_object"}
    return fields


def _tool_choice(given: dict[str, Any]) -> dict[str, Any]:
    config = camel(read_field(camel(given), "functionCallingConfig", dict, {}, "toolConfig."))
    mode, allowed = config.get("mode", "AUTO"), config.get("allowedFunctionNames")
    if not isinstance(mode, str) or mode not in _MODES:
        where = "toolConfig.functionCallingConfig.mode"
        raise RequestError(f"{where} must be AUTO, ANY, VALIDATED or NONE", where)
    choice: Any = _MODES[mode]
    if choice == "required" and isinstance(allowed, list) and len(allowed) == 1:
        choice = {"type": "function", "function": {"name": allowed[0]}}
    return {} if choice is None else {"tool_choice": choice}


def _json_schema(schema: Any) -> Any:
    """A schema in JSON Schema's words; Google's own writes types in capitals, and `nullable`."""
    if not isinstance(schema, dict) or schema.get("type") not in _TYPES:
        return schema
    return _lowered(schema)


def _lowered(value: Any) -> Any:
    if isinstance(value, list):
        return [_lowered(item) for item in value]
    if not isinstance(value, dict):
        return value
    out = {name: _lowered(item) for name, item in value.items() if name not in _GOOGLE_ONLY}
    if isinstance(named := value.get("properties"), dict):
        out["properties"] = {name: _lowered(item) for name, item in named.items()}
    kind = value.get("type")
    if kind in _TYPES:
        word = str(kind).lower()
        out["type"] = [word, "null"] if value.get("nullable") is True else word
    return out


def _model(name: str) -> dict[str, Any]:
    return {
        "name": f"models/{name}",
        "displayName": name,
        "version": "1",
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }
