"""First requests of real agent programs, from recorded traffic, each beside a chat request of its size.

The folder in POLAR_FIXTURES_DIR holds one JSON-lines file a program, one HTTP exchange a line. Text that
was taken out of the recordings (`[placeholder HASH, N chars]`) becomes as much other text again. Both
requests of a pair want the whole answer at once and ask the mock engine for the same ids.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gateway.workload import Load, dump, first_request, mark, text

PROGRAMS: Mapping[str, str] = {"responses": "codex", "messages": "claude", "google": "gemini"}
"""Dialect → whose requests are taken for it."""
_PLACEHOLDER = re.compile(r"\[placeholder ([0-9a-f]{8}), (\d+) chars\]")
_LAST_TEXT = 60_000
"""Tokens at which a placeholder's text may begin, at most."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request of a program, and a plain one like it."""

    program: str
    path: str
    body: bytes
    chat_body: bytes


def fixtures() -> Path | None:
    """The folder; none where it is not given or lacks a program."""
    named = os.environ.get("POLAR_FIXTURES_DIR")
    files = [] if not named else [Path(named) / f"{program}.jsonl" for program in PROGRAMS.values()]
    return Path(named) if named and all(file.is_file() for file in files) else None


def read_recorded(folder: Path, load: Load) -> dict[str, Recorded]:
    """By dialect: the largest of those requests that begin a session and were answered."""
    found = {}
    for dialect, program in PROGRAMS.items():
        exchanges = [json.loads(line) for line in (folder / f"{program}.jsonl").read_text().splitlines()]
        firsts = [each for each in exchanges if _begins_a_session(each, dialect)]
        if not firsts:
            raise LookupError(f"{program}.jsonl has no answered first request in the {dialect} dialect")
        bodies = [_body(exchange["body"], mark(load.prompt, load.sampled)) for exchange in firsts]
        body = max(bodies, key=len)
        path = firsts[bodies.index(body)]["path"].replace(":streamGenerateContent", ":generateContent")
        found[dialect] = Recorded(program, path, body, _chat_of_size(len(body), load))
    return found


def _begins_a_session(exchange: dict[str, Any], dialect: str) -> bool:
    ends = {"responses": "/responses", "messages": "/messages", "google": "enerateContent"}[dialect]
    is_call = exchange["method"] == "POST" and exchange["path"].endswith(ends)
    return is_call and exchange["n"] == 0 and exchange["response"]["status"] == 200


def _body(recorded: dict[str, Any], wish: str) -> bytes:
    """The recorded body, whole again, with the mock engine's wish behind its last message."""
    raw = dump(recorded).decode()
    body = json.loads(_PLACEHOLDER.sub(lambda m: json.dumps(_prose(m[1], int(m[2])))[1:-1], raw))
    body.pop("stream", None)
    if "contents" in body:
        body["contents"][-1]["parts"].append({"text": wish})
    elif "messages" in body:
        _add_text(body["messages"][-1], {"type": "text", "text": wish})
    else:
        _add_text(body["input"][-1], {"type": "input_text", "text": wish})
    return dump(body)


def _add_text(message: dict[str, Any], part: dict[str, Any]) -> None:
    content = message["content"]
    message["content"] = content + part["text"] if isinstance(content, str) else [*content, part]


def _prose(name: str, size: int) -> str:
    """`size` characters, the same for the same name."""
    begin = int(name, 16) % _LAST_TEXT
    found = text(begin, begin + size)
    return (found * (size // len(found) + 1))[:size]


def _chat_of_size(size: int, load: Load) -> bytes:
    """A first chat request of exactly so many bytes."""
    made = json.loads(first_request(Load(max(1, size // 1000 - 1), load.prompt, load.sampled)))
    missing = size - len(dump(made))
    if missing < 0:
        raise LookupError(f"no chat request is as small as {size} bytes")
    made["messages"][0]["content"] += "x" * missing
    return dump(made)
