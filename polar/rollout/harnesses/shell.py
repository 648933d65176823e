"""Harness `shell`: any command; base URLs and key come by environment."""

import json
from dataclasses import dataclass

from polar.core.harness_environment import gateway_environment
from schemas.ids import parse_session_id
from schemas.nodes import StartSession


@dataclass(frozen=True, slots=True)
class Connection:
    """How a harness reaches its gateway."""

    gateway_url: str
    """Base URL without path."""
    key: str


def session_environment(start: StartSession) -> dict[str, str]:
    """What harness and evaluator both see; nothing in it opens a gateway."""
    task_id, member, _, _ = parse_session_id(start.session_id)
    return {
        **start.task.harness.env,
        "POLAR_SESSION_ID": start.session_id,
        "POLAR_TASK_ID": task_id,
        "POLAR_MEMBER": str(member),
        "POLAR_PROMPT": start.task.prompt,
        "POLAR_METADATA": json.dumps(start.task.metadata, ensure_ascii=False),
    }


def harness_environment(start: StartSession, connection: Connection) -> dict[str, str]:
    """What the harness sees: the session, and where every provider's client finds its gateway."""
    session = session_environment(start)
    return {**session, **gateway_environment(connection.gateway_url, connection.key, session)}
