"""OpenAI Responses, the conversation: input items → canonical messages.

One turn of the assistant is several items (reasoning, message, calls); items belong to one turn
when nothing stands between them and their ids, which this gateway made, name one response.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from polar.core.dialects.body import RequestError, read_field
from polar.core.dialects.canonical import canonical_content, image_part, joined, tool_call
from polar.core.dialects.sealed import unseal

_OWN_ID = re.compile(r"[a-z]+_(.+)_\d+")
_FOREIGN_STATE = {
    "item_reference": "send the item itself: nothing is stored here",
    "compaction": "another server's compacted history cannot be read here",
}
_HOSTED = ("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call")
"""Traces of tools that another server ran."""
CUSTOM_INPUT = "input"
"""The one argument of a function that stands for a custom tool."""
LOCAL_SHELL = "local_shell"


def engine_name(name: str, namespace: str = "") -> str:
    """A tool's name for the engine: the same whichever tools a request offers."""
    return f"{namespace}__{name}" if namespace else name


class Conversation:
    """Takes items in order."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        """Tools that came as items."""
        self.notes: list[str] = []
        self._turn = _Turn()
        self._items: Mapping[str, Callable[[dict[str, Any], str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "local_shell_call": self._shell_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "local_shell_call_output": self._output,
            "additional_tools": self._tools,
        }

    def take(self, item: Any, where: str) -> None:
        """One item. Raises RequestError."""
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object", where)
        kind = item.get("type", "message")
        take = self._items.get(kind) if isinstance(kind, str) else None
        if take is not None:
            take(item, where)
        elif kind in _HOSTED:
            self.notes.append(f"{where}: {kind} is left out")
        else:
            remedy = _FOREIGN_STATE.get(str(kind), f"known are {', '.join(self._items)}")
            raise RequestError(f"{where}.type {kind!r} cannot be used: {remedy}", f"{where}.type")

    def end(self) -> tuple[dict[str, Any], ...]:
        """All messages."""
        self._flush()
        return tuple(self.messages)

    def _flush(self) -> None:
        if message := self._turn.message():
            self.messages.append(message)
            self._turn = _Turn()

    def _join(self, item: dict[str, Any], *, full: bool) -> "_Turn":
        """The turn that the item belongs to; `full`: only its own response's turn takes it."""
        match = _OWN_ID.fullmatch(str(item.get("id") or ""))
        response = match[1] if match else ""
        known = self._turn.response
        is_same = bool(response) and response == known
        if not is_same and (full or (response and known)):
            self._flush()
        self._turn.response = response or self._turn.response
        return self._turn

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str):
            raise RequestError(f"{where}.role must be a string", f"{where}.role")
        content = _content(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._join(item, full=bool(self._turn.contents)).contents.append(content)
        else:
            self._flush()
            self.messages.append({"role": role, "content": content})

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        turn = self._join(item, full=bool(self._turn.contents or self._turn.calls))
        text = unseal(item.get("encrypted_content"))
        for name in ("content", "summary"):
            if not text and item.get(name):
                content = canonical_content(item[name], f"{where}.{name}")
                text = content if isinstance(content, str) else ""
        if text:
            turn.reasoning.append(text)

    def _function_call(self, item: dict[str, Any], where: str) -> None:
        arguments = item.get("arguments")
        if isinstance(arguments, dict):
            arguments = orjson.dumps(arguments).decode()
        self._call(item, where, arguments if isinstance(arguments, str) else "")

    def _custom_call(self, item: dict[str, Any], where: str) -> None:
        text = read_field(item, "input", str, "", f"{where}.")
        self._call(item, where, orjson.dumps({CUSTOM_INPUT: text}).decode())

    def _shell_call(self, item: dict[str, Any], where: str) -> None:
        action = read_field(item, "action", dict, {}, f"{where}.")
        arguments = {name: value for name, value in action.items() if name != "type"}
        self._call({**item, "name": LOCAL_SHELL}, where, orjson.dumps(arguments).decode())

    def _call(self, item: dict[str, Any], where: str, arguments: str) -> None:
        name = item.get("name")
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}.name must be text", f"{where}.name")
        name = engine_name(name, read_field(item, "namespace", str, "", f"{where}."))
        self._join(item, full=False).calls.append(tool_call(_call_id(item, where), name, arguments))

    def _output(self, item: dict[str, Any], where: str) -> None:
        self._flush()
        output = item.get("output")
        if isinstance(output, dict):
            output = orjson.dumps(output).decode()
        content = _content(output, f"{where}.output")
        self.messages.append({"role": "tool", "tool_call_id": _call_id(item, where), "content": content})

    def _tools(self, item: dict[str, Any], where: str) -> None:
        self.tools += read_field(item, "tools", list, [], f"{where}.")


class _Turn:
    """An assistant message in the making."""

    def __init__(self) -> None:
        self.response = ""
        """Id of the response that its items come from, where it is known."""
        self.reasoning: list[str] = []
        self.contents: list[str | list[dict[str, Any]]] = []
        self.calls: list[dict[str, Any]] = []

    def message(self) -> dict[str, Any] | None:
        if not (self.reasoning or self.contents or self.calls):
            return None
        message: dict[str, Any] = {"role": "assistant", "content": self._content()}
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def _content(self) -> str | list[dict[str, Any]]:
        """Texts that this gateway cut at a call are one text again."""
        if all(isinstance(content, str) for content in self.contents):
            return "".join(map(str, self.contents))
        parts: list[str | dict[str, Any]] = []
        for content in self.contents:
            parts.extend([content] if isinstance(content, str) else content)
        return joined(parts)


def _content(value: Any, where: str) -> str | list[dict[str, Any]]:
    content = canonical_content(value, where)
    if isinstance(content, str):
        return content
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: dict[str, Any], where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("text", "input_audio", "image_url"):
        return part
    if kind == "input_image":
        url = part.get("image_url")
        if isinstance(url, dict):
            url = url.get("url")
        if not isinstance(url, str):
            raise RequestError(f"{where}.image_url must be a URL or a data URI", f"{where}.image_url")
        return image_part(url)
    raise RequestError(f"{where}.type {kind!r} cannot be used: send text or images", f"{where}.type")


def _call_id(item: dict[str, Any], where: str) -> str:
    call_id = item.get("call_id") or item.get("id")
    if not isinstance(call_id, str):
        raise RequestError(f"{where}.call_id must be text", f"{where}.call_id")
    return call_id
