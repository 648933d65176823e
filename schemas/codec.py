"""Bytes → event, with every way to fail named."""

import json
from typing import Literal

from pydantic import ValidationError

from schemas.base import Event
from schemas.topics import MODEL_OF, TopicSpec

UnreadableReason = Literal["not_json", "unknown_type", "schema_version", "invalid", "wrong_topic"]


class UnreadableRecordError(ValueError):
    """A record's value is no event of its topic; `reason` is the dead letter's reason."""

    def __init__(self, reason: UnreadableReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: UnreadableReason = reason
        self.detail = detail


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def decode(data: bytes | None, topic: TopicSpec) -> Event:
    """Read one value of a topic. Raises UnreadableRecordError and nothing else."""
    try:
        value = json.loads(data or b"", parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise UnreadableRecordError("not_json", str(error)) from error
    if not isinstance(value, dict):
        raise UnreadableRecordError("not_json", f"a JSON object is expected, not {type(value).__name__}")
    model = MODEL_OF.get(str(value.get("type")))
    if model is None:
        raise UnreadableRecordError("unknown_type", f"type {value.get('type')!r} is unknown")
    if model not in topic.models:
        raise UnreadableRecordError("wrong_topic", f"{model.__name__} does not belong on {topic.name}")
    version = value.get("schema_version", 1)
    if not isinstance(version, int) or version > model.SCHEMA_MAJOR:
        raise UnreadableRecordError(
            "schema_version", f"{model.__name__} {version!r}, this reader knows {model.SCHEMA_MAJOR}"
        )
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or model.__name__
        raise UnreadableRecordError("invalid", f"{where}: {first['msg']}") from error
