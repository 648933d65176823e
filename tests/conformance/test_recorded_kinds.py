"""Kinds of the calls that real harnesses made, from their recorded requests (POLAR_FIXTURES_DIR)."""

import os
from functools import cache
from pathlib import Path

import pytest

from bench.recorded_harnesses import read_requests
from polar.core.call_kinds import decide_kinds
from polar.core.dialects.base import ModelRequest
from polar.core.dialects.engine_body import sampling_asked
from tests.unit.core.call_records import SessionRecords

FOLDER = os.environ.get("POLAR_FIXTURES_DIR", "")

pytestmark = pytest.mark.skipif(
    not FOLDER or not Path(FOLDER).is_dir(),
    reason="POLAR_FIXTURES_DIR names no folder of recorded harness traffic: kinds are NOT checked on it",
)


@cache
def requests() -> dict[str, list[ModelRequest]]:
    return read_requests(Path(FOLDER))


def kinds_of(scenario: str) -> list[str]:
    session = SessionRecords()
    for request in requests()[scenario]:
        session.call(
            [1],
            [2],
            messages=request.messages,
            tools=request.tools,
            native_ids=dict(request.native_ids),
            kind=request.kind,
            thread_id=request.thread_id,
            sampling_asked=sampling_asked(request.fields),
            answer={},
        )
    return [kind.kind for kind in decide_kinds(session.records).values()]


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("codex/sub", ["agent", "agent", "subagent", "subagent", "agent"]),
        ("claude/sub", ["agent", "agent", "subagent", "subagent", "agent"]),
        ("qwen/sub", ["agent", "agent", "subagent", "subagent", "agent"]),
        ("opencode/sub", ["auxiliary", "agent", "subagent", "subagent", "agent"]),
        ("opencode/basic", ["auxiliary", "agent", "agent", "agent"]),
        ("opencode/basic~anthropic", ["auxiliary", "agent", "agent", "agent"]),
        ("opencode/basic~responses", ["auxiliary", "agent", "agent", "agent"]),
        ("gemini/basic~auto", ["auxiliary", "agent", "agent", "agent"]),
        ("codex/long8usage16000~compact", ["agent", "compaction", "agent", "compaction", "agent"]),
        ("qwen/ectx", ["agent", "compaction", "agent"]),
        ("pi/long6usage130000~compact", ["agent"] * 7 + ["compaction"]),
    ],
)
def test_marked_and_structural_kinds(scenario: str, expected: list[str]) -> None:
    assert kinds_of(scenario) == expected


def test_plain_loops_are_the_agents_own() -> None:
    plain = [name for name in requests() if name.endswith("/basic") and not name.startswith("opencode")]
    assert len(plain) >= 6
    assert {kind for name in plain for kind in kinds_of(name)} == {"agent"}
