"""Anthropic Messages, the conversation: blocks → canonical messages.

Cache marks, signatures and `is_error` are no part of what a model reads. Results of tools come
before the rest of their message, as chat wants it. Text that this gateway cut at a call is
one text again; text blocks that a harness put side by side are joined by a line end.
"""

from collections.abc import Mapping
from typing import Any

from polar.core.dialects.body import RequestError, read_field
from polar.core.dialects.canonical import data_uri, image_part, joined, tool_call
from polar.core.dialects.sealed import unseal
from polar.core.dialects.unparsed import arguments_of

BILLING = "x-anthropic-billing-header:"
"""Begins a system block that Claude Code writes anew for each version and sub-agent."""
_HOSTED = ("server_tool_use", "web_search_tool_result", "redacted_thinking", "container_upload")


class Conversation:
    """Takes the system prompt, then messages in order."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.billing = ""
        self.referenced: set[str] = set()
        """Deferred tools that a result of a search named."""

    def take_system(self, system: Any) -> None:
        """Text or text blocks. Raises RequestError."""
        texts = []
        for text in self._system_texts(system, "system"):
            if text.startswith(BILLING):
                self.billing = text.removeprefix(BILLING).strip()
            else:
                texts.append(text)
        if texts:
            self.messages.append({"role": "system", "content": "\n".join(texts)})

    def take(self, message: Any, where: str) -> None:
        """One message. Raises RequestError."""
        if not isinstance(message, dict):
            raise RequestError(f"{where} must be an object", where)
        role, content = message.get("role"), message.get("content")
        if role == "system":
            text = "\n".join(self._system_texts(content, f"{where}.content"))
            self.messages.append({"role": "system", "content": text})
            return
        if role not in ("user", "assistant"):
            raise RequestError(f"{where}.role must be user, assistant or system", f"{where}.role")
        if isinstance(content, str):
            self.messages.append({"role": role, "content": content})
            return
        if not isinstance(content, list):
            raise RequestError(f"{where}.content must be text or a list of blocks", f"{where}.content")
        if role == "user":
            self._user(content, f"{where}.content")
        else:
            self._assistant(content, f"{where}.content")

    def _system_texts(self, value: Any, where: str) -> list[str]:
        if value is None:
            return []
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise RequestError(f"{where} must be text or a list of text blocks", where)
        return [_text(_block(block, f"{where}[{i}]"), f"{where}[{i}]") for i, block in enumerate(value)]

    def _user(self, blocks: list[Any], where: str) -> None:
        parts: list[str | dict[str, Any]] = []
        results = 0
        for index, block in enumerate(blocks):
            at = f"{where}[{index}]"
            if _block(block, at).get("type") == "tool_result":
                self._result(block, at)
                results += 1
            else:
                parts.append(self._part(block, at))
        if parts or not results:
            self.messages.append({"role": "user", "content": joined(parts)})

    def _result(self, block: Mapping[str, Any], where: str) -> None:
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str):
            raise RequestError(f"{where}.tool_use_id must be text", f"{where}.tool_use_id")
        content = block.get("content")
        if isinstance(content, list):
            at = f"{where}.content"
            content = joined([self._part(part, f"{at}[{i}]") for i, part in enumerate(content)])
        elif content is None:
            content = ""
        elif not isinstance(content, str):
            raise RequestError(f"{where}.content must be text or a list of blocks", f"{where}.content")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _part(self, block: Any, where: str) -> str | dict[str, Any]:
        kind = _block(block, where).get("type")
        if kind == "text":
            return _text(block, where)
        if kind == "image":
            return image_part(_image_url(read_field(block, "source", dict, {}, f"{where}."), where))
        if kind == "document":
            source = read_field(block, "source", dict, {}, f"{where}.")
            if source.get("type") == "text" and isinstance(source.get("data"), str):
                return str(source["data"])
        if kind == "tool_reference":
            name = read_field(block, "tool_name", str, "", f"{where}.")
            self.referenced.add(name)
            return f"The tool {name} can be called now."
        raise RequestError(f"{where}.type {kind!r} cannot be used: send text or images", f"{where}.type")

    def _assistant(self, blocks: list[Any], where: str) -> None:
        text, reasoning = "", ""
        calls: list[dict[str, Any]] = []
        last = ""
        for index, block in enumerate(blocks):
            at = f"{where}[{index}]"
            kind = _block(block, at).get("type")
            if kind == "text":
                text += ("\n" if last == "text" else "") + _text(block, at)
            elif kind == "thinking":
                reasoning += read_field(block, "thinking", str, "", f"{at}.") or unseal(
                    block.get("signature")
                )
            elif kind == "tool_use":
                calls.append(_call(block, at))
            elif kind in _HOSTED:
                self.notes.append(f"{at}: {kind} is left out")
            else:
                raise RequestError(f"{at}.type {kind!r} is no block of an assistant", f"{at}.type")
            last = str(kind)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)


def _block(block: Any, where: str) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise RequestError(f"{where} must be an object", where)
    return block


def _text(block: Mapping[str, Any], where: str) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be text", f"{where}.text")
    return text


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    name, call_id = block.get("name"), block.get("id")
    if not isinstance(name, str) or not isinstance(call_id, str):
        raise RequestError(f"{where} needs id and name as text", where)
    return tool_call(call_id, name, arguments_of(block.get("input")))


def _image_url(source: Mapping[str, Any], where: str) -> str:
    kind, url, data = source.get("type"), source.get("url"), source.get("data")
    if kind == "url" and isinstance(url, str):
        return url
    if kind == "base64" and isinstance(data, str):
        return data_uri(source.get("media_type"), data)
    raise RequestError(f"{where}.source must hold base64 data or a URL", f"{where}.source")
