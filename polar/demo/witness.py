"""Reads what the demo's witnesses kept: the relay's raw engine answers and the agents' journal.

Invariant: nothing here uses the gateway's code or records; ids and log-probs are taken from the
engine's own bytes.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """One raw engine answer."""

    number: int
    at: float
    """Unix seconds at which the request came."""
    purpose: str
    """`probe`, `call` or `canary`, as the caller said; empty when it said nothing."""
    call: str
    """The call for which the gateway asked, as it said."""
    status: int
    complete: bool
    """The engine sent its end."""
    forwarded: bool
    """The end was handed to the asker's connection."""
    response_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One answer whose end an agent received."""

    session: str
    response_id: str
    content_sha256: str


def read_answers(path: Path) -> list[Answer]:
    """Answers in the order in which they were kept; a line torn by kill -9 is left out."""
    lines = list(_json_lines(path))
    forwarded = {line["forwarded"] for line in lines if "forwarded" in line}
    return [_answer(line, forwarded=line["n"] in forwarded) for line in lines if "n" in line]


def read_journal(path: Path) -> list[JournalEntry]:
    """Entries in the order in which they were written."""
    return [JournalEntry(**line) for line in _json_lines(path)]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def _answer(line: dict[str, Any], *, forwarded: bool) -> Answer:
    response_id = ""
    prompt: list[int] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    for part in _parts(line["body"]):
        response_id = response_id or str(part.get("id") or "")
        prompt = prompt or part.get("prompt_token_ids") or []
        for choice in part.get("choices") or []:
            # The completions endpoint puts the prompt's ids into the choice.
            prompt = prompt or choice.get("prompt_token_ids") or []
            tokens += choice.get("token_ids") or []
            content = (choice.get("logprobs") or {}).get("content") or []
            logprobs += [item["logprob"] for item in content]
    return Answer(
        number=line["n"],
        at=line["at"],
        purpose=line["purpose"],
        call=line["call"],
        status=line["status"],
        complete=line["complete"],
        forwarded=forwarded,
        response_id=response_id,
        prompt_ids=tuple(prompt),
        token_ids=tuple(tokens),
        logprobs=tuple(logprobs),
    )


def _parts(body: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of a body: one, or one an event of a stream."""
    stripped = body.lstrip()
    texts = [stripped]
    if stripped.startswith(("data:", "event:", ":")):
        texts = [row[5:].strip() for row in body.splitlines() if row.startswith("data:")]
    for text in texts:
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
