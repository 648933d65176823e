"""Bodies of the rollout API: strict, with an error that says what to type instead."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from schemas.tasks import TaskRequest

MAX_BODY_BYTES = 8 << 20
MAX_VARIABLE_BYTES = 120_000
"""Linux refuses a single environment variable of 128 KiB."""


class BadRequestError(ValueError):
    """A request that the API refuses; `status` and `error` are the HTTP answer."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(str(error["message"]))
        self.status = status
        self.error = dict(error)


def refuse(status: int, kind: str, message: str, *, remedy: str = "", **more: Any) -> BadRequestError:
    """The error to raise: a type for programs, a message and a remedy for people."""
    return BadRequestError(status, {"type": kind, "message": message, "remedy": remedy, **more})


def parse_task(content_type: str, body: bytes) -> TaskRequest:
    """The task of a POST body. Raises BadRequestError (400, 413, 415, 422)."""
    # A browser may send a form to any local port without asking; JSON it may not.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise refuse(
            415,
            "unsupported_media_type",
            f"Content-Type is {content_type!r}",
            remedy="send JSON with Content-Type: application/json",
        )
    if len(body) > MAX_BODY_BYTES:
        raise refuse(
            413,
            "too_large",
            f"the body has more than {MAX_BODY_BYTES} bytes",
            remedy="put large files where the nodes can read them and name their path",
        )
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise refuse(
            400, "not_json", f"the body is no JSON: {error}", remedy="send one JSON object"
        ) from error
    if not isinstance(value, dict):
        raise refuse(
            400, "not_json", f"the body is a JSON {type(value).__name__}", remedy="send one JSON object"
        )
    try:
        task = TaskRequest.model_validate(value, extra="forbid")
    except ValidationError as error:
        problems = [
            _problem(item["loc"], item["type"], item["msg"]) for item in error.errors(include_url=False)
        ]
        first = problems[0]
        raise refuse(
            422,
            "invalid_task",
            f"{first['field']}: {first['message']}",
            remedy=str(first["remedy"]),
            field=first["field"],
            problems=problems,
        ) from error
    for field, text in (("prompt", task.prompt), ("metadata", json.dumps(task.metadata, ensure_ascii=False))):
        if len(text.encode("utf-8", "replace")) > MAX_VARIABLE_BYTES:
            raise refuse(
                422,
                "invalid_task",
                f"{field}: more than {MAX_VARIABLE_BYTES} bytes do not fit in an environment variable",
                remedy=f"put it into runtime.files and let the harness read the file, not {field}",
                field=field,
            )
    return task


def _problem(loc: Sequence[int | str], kind: str, message: str) -> dict[str, Any]:
    field = ".".join(map(str, loc)) or "(body)"
    if kind == "extra_forbidden":
        known = _fields_at(loc[:-1])
        close = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        remedy = f"{hint}known fields: {', '.join(known)}"
        return {"field": field, "message": "unknown field", "remedy": remedy}
    if kind == "missing":
        return {"field": field, "message": "is missing", "remedy": f"add {field}"}
    return {"field": field, "message": message, "remedy": f"correct {field}"}


def _fields_at(path: Sequence[int | str]) -> list[str]:
    model: type[BaseModel] = TaskRequest
    for name in path:
        kind = model.model_fields[str(name)].annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return []
        model = kind
    return sorted(model.model_fields)
