"""Google generateContent, the conversation: contents → canonical messages.

Calls and their results pair by id where both have one, else by name and place, since some harnesses
drop ids. What one turn of the model was may come in several contents, one a chunk of a stream.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from polar.core.dialects.body import RequestError, read_field
from polar.core.dialects.canonical import data_uri, image_part, joined, tool_call
from polar.core.dialects.sealed import unseal
from polar.core.dialects.unparsed import arguments_of

_HOSTED = ("executableCode", "codeExecutionResult", "toolCall", "toolResponse")
_PLAIN_RESULTS = ("output", "result", "content")
"""Fields in which harnesses put a result that is only a text."""


def camel(fields: dict[str, Any]) -> dict[str, Any]:
    """The object with its names in camel case; both spellings are Google's."""
    if not any("_" in name for name in fields):
        return fields
    return {_camel_name(name): value for name, value in fields.items()}


class Conversation:
    """Takes the system instruction, then contents in order."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._turn: _Turn | None = None
        self._waiting: list[tuple[str, str]] = []
        """(name, id) of calls without a result, in order."""
        self._calls = 0

    def take_system(self, value: Any) -> None:
        """Text, a content or parts. Raises RequestError."""
        if value is None:
            return
        if isinstance(value, str):
            value = {"parts": [{"text": value}]}
        texts = []
        for part, where in _parts(value, "systemInstruction"):
            if not isinstance(part.get("text"), str):
                raise RequestError(f"{where}.text must be text", f"{where}.text")
            texts.append(part["text"])
        self.messages.append({"role": "system", "content": "\n".join(texts)})

    def take(self, content: Any, where: str) -> None:
        """One content. Raises RequestError."""
        if isinstance(content, str):
            content = {"parts": [{"text": content}]}
        if not isinstance(content, dict):
            raise RequestError(f"{where} must be an object", where)
        role = read_field(content, "role", str, "user", f"{where}.")
        if role == "model":
            self._turn = self._turn or _Turn()
            for part, at in _parts(content, where):
                self._model_part(self._turn, part, at)
            return
        if role not in ("user", "function", "tool"):
            raise RequestError(f"{where}.role must be user or model", f"{where}.role")
        self.end()
        parts: list[str | dict[str, Any]] = []
        results = 0
        for part, at in _parts(content, where):
            if "functionResponse" in part:
                self._result(camel(read_field(part, "functionResponse", dict, {}, f"{at}.")), at)
                results += 1
            else:
                parts.append(_user_part(part, at))
        if parts or not results:
            self.messages.append({"role": "user", "content": joined(parts)})

    def end(self) -> None:
        """The model's turn is over."""
        if self._turn is not None:
            self.messages.append(self._turn.message())
            self._turn = None

    def _model_part(self, turn: "_Turn", part: dict[str, Any], where: str) -> None:
        if sealed := unseal(part.get("thoughtSignature")):
            turn.sealed = sealed
        if "functionCall" in part:
            call = read_field(part, "functionCall", dict, {}, f"{where}.")
            turn.calls.append(self._call(call, f"{where}.functionCall"))
        elif isinstance(text := part.get("text"), str):
            (turn.thoughts if part.get("thought") else turn.texts).append(text)
        elif any(name in part for name in _HOSTED):
            self.notes.append(f"{where}: {', '.join(part)} is left out")
        elif "thoughtSignature" not in part:
            raise RequestError(f"{where} must hold text or functionCall", where)

    def _call(self, call: dict[str, Any], where: str) -> dict[str, Any]:
        name = call.get("name")
        if not isinstance(name, str):
            raise RequestError(f"{where}.name must be text", f"{where}.name")
        call_id = read_field(call, "id", str, "", f"{where}.") or f"call_{self._calls}"
        self._calls += 1
        self._waiting.append((name, call_id))
        return tool_call(call_id, name, arguments_of(call.get("args")))

    def _result(self, result: dict[str, Any], where: str) -> None:
        name = read_field(result, "name", str, "", f"{where}.functionResponse.")
        call_id = read_field(result, "id", str, "", f"{where}.functionResponse.")
        content = joined([_result_text(result.get("response")), *_result_media(result, where)])
        self.messages.append(
            {"role": "tool", "tool_call_id": self._paired(name, call_id), "content": content}
        )

    def _paired(self, name: str, call_id: str) -> str:
        waiting = self._waiting
        place = next((i for i, (_, known) in enumerate(waiting) if known == call_id), None)
        if place is None:
            place = next((i for i, (known, _) in enumerate(waiting) if known == name), None)
        if place is None:
            return call_id or f"call_{self._calls}"
        return waiting.pop(place)[1]


class _Turn:
    """An assistant message in the making."""

    def __init__(self) -> None:
        self.thoughts: list[str] = []
        self.sealed = ""
        self.texts: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts)}
        # Sealed it is as it was sampled; visible thoughts may be shortened.
        if reasoning := self.sealed or "".join(self.thoughts):
            message["reasoning"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _parts(content: Any, where: str) -> list[tuple[dict[str, Any], str]]:
    """(part, its place) for each part. Raises RequestError."""
    given = content.get("parts") if isinstance(content, dict) else content
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list):
        raise RequestError(f"{where}.parts must be a list", f"{where}.parts")
    parts = []
    for index, part in enumerate(given):
        at = f"{where}.parts[{index}]"
        if isinstance(part, str):
            part = {"text": part}  # noqa: PLW2901 - a text is a part of one text
        if not isinstance(part, dict):
            raise RequestError(f"{at} must be an object", at)
        parts.append((camel(part), at))
    return parts


def _user_part(part: Mapping[str, Any], where: str) -> str | dict[str, Any]:
    if isinstance(part.get("text"), str):
        return str(part["text"])
    if "inlineData" in part:
        data = camel(read_field(part, "inlineData", dict, {}, f"{where}."))
        if str(data.get("mimeType", "")).startswith("image/") and isinstance(data.get("data"), str):
            return image_part(data_uri(data["mimeType"], data["data"]))
    if "fileData" in part:
        uri = camel(read_field(part, "fileData", dict, {}, f"{where}.")).get("fileUri")
        if isinstance(uri, str) and uri.startswith(("https://", "http://", "data:")):
            return image_part(uri)
    raise RequestError(f"{where} cannot be used: send text, images or functionResponse", where)


def _result_text(response: Any) -> str:
    """A result as the model reads it: the text alone where there is only a text."""
    if isinstance(response, dict) and len(response) == 1:
        name, value = next(iter(response.items()))
        if name in _PLAIN_RESULTS and isinstance(value, str):
            return value
    if isinstance(response, str):
        return response
    return "" if response is None else orjson.dumps(response).decode()


def _result_media(result: Mapping[str, Any], where: str) -> list[str | dict[str, Any]]:
    if result.get("parts") is None:
        return []
    return [_user_part(part, at) for part, at in _parts(result, f"{where}.functionResponse")]


def _camel_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in rest)
