"""Recorded traffic of real harnesses (folder in POLAR_FIXTURES_DIR), a loop of exchanges at a time."""

import json
import os
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from polar.core.dialects.base import Dialect, ModelRequest
from polar.core.dialects.google import GoogleDialect
from tests.conformance.reading import DIALECTS, Read, read_stream, read_whole

_FOLDER = os.environ.get("POLAR_FIXTURES_DIR", "")
_OTHER_SERVERS_ENDS = ("NO TERMINAL EVENT", "WEBSOCKET PROBE")


@dataclass
class Exchange:
    """One request and what it was answered."""

    line: dict[str, Any]

    @property
    def name(self) -> str:
        """The dialect's name."""
        path = self.line["path"]
        endings = {"/chat/completions": "chat", "/responses": "responses", "/messages": "messages"}
        return next((name for ending, name in endings.items() if path.endswith(ending)), "google")

    @property
    def dialect(self) -> Dialect:
        if self.name == "google":
            return GoogleDialect(stream="streamGenerateContent" in self.line["path"])
        return DIALECTS[self.name]

    def request(self) -> ModelRequest:
        headers = {name.lower().encode(): value.encode() for name, value in self.line["headers"]}
        target = self.line["path"].rpartition("/models/")[2].partition(":")[0]
        return self.dialect.parse_request(json.dumps(self.line["body"]).encode(), headers, target)

    def answer(self) -> Read | None:
        """What the harness understood, if the answer was one."""
        response = self.line["response"]
        if response["status"] != 200 or response.get("note") in _OTHER_SERVERS_ENDS:
            return None
        body = response["body"]
        if isinstance(body, list):
            return read_stream(self.name, [data for _, data in body if data != "[DONE]"])
        return read_whole(self.name, body)


def loops(*kinds: str) -> list[Any]:
    """One pytest parameter a harness and scenario; a single skipped one without the folder.

    `kinds`: only scenarios of these names, in any variant (`name~variant`).
    """
    paths = sorted(Path(_FOLDER).glob("*.jsonl")) if _FOLDER else []
    if not paths:
        reason = "POLAR_FIXTURES_DIR names no folder of recorded traffic: real requests are NOT replayed"
        return [pytest.param([], id="no-traffic", marks=pytest.mark.skip(reason=reason))]
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    posts = [line for line in lines if line["method"] == "POST"]
    return [
        pytest.param([Exchange(line) for line in group], id=f"{harness}-{scenario}")
        for (harness, scenario), group in groupby(posts, lambda line: (line["harness"], line["scenario"]))
        if not kinds or scenario.split("~")[0] in kinds
    ]
