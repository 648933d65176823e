"""For chat templates that take a system message only in front.

Codex and Claude Code send system messages where they like. Moving a late one to the front would
change the beginning of the prompt in every turn, so it stays in its place, as a user's message.
"""

from typing import Any

from msgspec.structs import replace

from polar.core.dialects.base import ModelRequest
from polar.core.dialects.canonical import joined

_SYSTEM = ("system", "developer")


def system_first(request: ModelRequest) -> ModelRequest:
    """The request with one system message, in front; a note for each message that changed."""
    messages = request.messages
    first = next((i for i, m in enumerate(messages) if m["role"] not in _SYSTEM), len(messages))
    late = [i for i in range(first, len(messages)) if messages[i]["role"] in _SYSTEM]
    if first < 2 and not late:
        return request
    notes = [f"messages[{index}]: {messages[index]['role']} is given as user" for index in late]
    if first > 1:
        notes.append(f"messages: {first} system messages in front are one")
    return replace(
        request,
        messages=(*_in_front(messages[:first]), *map(_as_user, messages[first:])),
        notes=(*request.notes, *notes),
        known_messages=None,
    )


def _in_front(messages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    if len(messages) < 2:
        return messages
    parts: list[str | dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        parts.extend([content] if isinstance(content, str) else content)
    return ({"role": "system", "content": joined(parts)},)


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] not in _SYSTEM:
        return message
    content = message["content"]
    marked = f"<system>\n{content}\n</system>" if isinstance(content, str) else content
    return {**message, "role": "user", "content": marked}
