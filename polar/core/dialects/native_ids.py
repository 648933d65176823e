"""Ids and marks that harnesses send of their own: session, thread, sub-agent, kind of call.

They say more than a session key does (which agent of the session calls), never whose call it is.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from polar.core.dialects.base import CallKind, Headers

_HEADERS = (
    "session-id", "thread-id", "x-client-request-id", "x-codex-window-id", "x-codex-parent-thread-id",
    "x-openai-subagent", "x-claude-code-session-id", "x-claude-code-agent-id", "x-session-id",
    "x-parent-session-id", "session_id", "x-stainless-retry-count",
)  # fmt: skip
_NAMES = tuple((name.encode(), name) for name in _HEADERS)
_TURN_METADATA = b"x-codex-turn-metadata"
_TURN_FIELDS = ("request_kind", "turn_id", "parent_thread_id", "window_number")
_THREADS = ("thread-id", "x-claude-code-agent-id", "x-session-id", "x-claude-code-session-id", "session_id")
"""Who the agent is, the most exact first."""
_SUBAGENTS = frozenset(
    {"x-codex-parent-thread-id", "x-openai-subagent", "x-claude-code-agent-id", "x-parent-session-id"}
)
_MAX_LENGTH = 256
"""Longer values are no ids."""


def native_ids(headers: Headers, body: Mapping[str, Any] | None = None) -> dict[str, str]:
    """By header name, or by a field's name for those that a body holds (`body`)."""
    ids = {
        name: value.decode("latin-1")
        for raw, name in _NAMES
        if (value := headers.get(raw)) and len(value) <= _MAX_LENGTH
    }
    agent = headers.get(b"user-agent", b"")
    if agent:
        ids["harness"] = agent.split(b"/", 1)[0].split(b" ", 1)[0][:_MAX_LENGTH].decode("latin-1").lower()
    if turn := headers.get(_TURN_METADATA):
        ids |= _texts(_parsed(turn), _TURN_FIELDS)
    for name, value in (body or {}).items():
        if isinstance(value, str) and 0 < len(value) <= _MAX_LENGTH:
            ids[name] = value
    return ids


def thread_of(ids: Mapping[str, str]) -> str:
    """The agent inside the session; empty where the harness does not tell."""
    return next((ids[name] for name in _THREADS if name in ids), "")


def kind_of(ids: Mapping[str, str]) -> CallKind:
    """What the harness itself says the call is for; the rest is told when the session is whole."""
    if ids.get("request_kind") == "compaction":
        return "compaction"
    billing = ids.get("x-anthropic-billing-header", "")
    return "subagent" if _SUBAGENTS & ids.keys() or "cc_is_subagent=true" in billing else "agent"


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _texts(fields: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, str]:
    return {
        name: str(value)
        for name in names
        if isinstance(value := fields.get(name), (str, int)) and len(str(value)) <= _MAX_LENGTH
    }
