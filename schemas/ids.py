"""Deterministic ids. No id holds a time or a random part that a replay could not repeat.

`session_id = task/member/attempt/epoch`; a call is `session_id#seq`, seq counting from 1.
"""

import re

from schemas.base import digest

TASK_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""A task id is part of session ids, file names and URLs, hence the narrow alphabet."""

_COUNT = r"(0|[1-9][0-9]*)"
_SESSION = re.compile(rf"([A-Za-z0-9][A-Za-z0-9._-]{{0,127}})/{_COUNT}/{_COUNT}/{_COUNT}")


def session_id(task_id: str, member: int, attempt: int, epoch: int) -> str:
    """Id of one attempt of one member. `epoch` is the scheduler's incarnation."""
    return f"{task_id}/{member}/{attempt}/{epoch}"


def parse_session_id(value: str) -> tuple[str, int, int, int]:
    """(task_id, member, attempt, epoch). Raises ValueError on any other form."""
    match = _SESSION.fullmatch(value)
    if match is None:
        raise ValueError(f"session_id {value!r} is not task/member/attempt/epoch")
    return match[1], int(match[2]), int(match[3]), int(match[4])


def group_of(session: str) -> str:
    """The group of a session: one task is one group, so this is its task id."""
    return parse_session_id(session)[0]


def call_id(session: str, seq: int) -> str:
    """Id of the seq-th call (from 1) of a session."""
    return f"{session}#{seq}"


def trajectory_id(session: str) -> str:
    """A session has one trajectory."""
    return f"trajectory:{session}"


def derived_id(kind: str, *parts: str) -> str:
    """A short id that is a pure function of its parts: `kind:` + 24 hex digits."""
    return f"{kind}:{digest(*(part.encode() for part in parts))[:24]}"
