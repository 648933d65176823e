"""The benchmark's own parts: the mock engine says what is asked of it, the load finds the ends of answers."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.gateway.deployment import MockEngine
from bench.gateway.load import Client, closed_loop, open_loop, request
from bench.gateway.recorded import PROGRAMS, fixtures, read_recorded
from bench.gateway.session_log import SessionLoad, record_cpu_us
from bench.gateway.workload import LOADS, MODEL, continuing_request, first_request, ids, in_dialect, text
from polar.core.dialects.engine_answer import load_call
from polar.core.dialects.engine_body import engine_body
from polar.core.token_text import TokenText
from schemas.tasks import SamplingSpec
from tests.conformance.reading import DIALECTS


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockEngine]:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("no C compiler: the benchmark of the gateway cannot run here")
    started = MockEngine(tmp_path_factory.mktemp("mock"), os.sched_getaffinity(0), None)
    yield started
    started.process.stop()


def asked(engine: MockEngine, body: bytes) -> bytes:
    async def ask() -> bytes:
        client = Client(engine.port)
        try:
            return await client.ask(request(engine.port, body))
        finally:
            client.close()

    return asyncio.run(ask())


def test_an_answer_has_the_ids_that_were_asked_for(engine: MockEngine) -> None:
    load = LOADS["5k"]
    body = first_request(load)
    assert abs(len(body) - 1000 * load.request_kb) < 1000
    answer = load_call(asked(engine, body))
    (choice,) = answer["choices"]
    assert isinstance(answer["prompt_token_ids"], TokenText)
    assert answer["prompt_token_ids"] == ids(0, load.prompt)
    assert choice["token_ids"] == ids(load.prompt, load.prompt + load.sampled)
    assert choice["message"]["content"] == text(load.prompt, load.prompt + load.sampled)
    assert len(choice["logprobs"]) == load.sampled
    assert answer["usage"]["total_tokens"] == load.prompt + load.sampled


def test_ids_that_are_brought_come_back(engine: MockEngine) -> None:
    body = json.loads(continuing_request(LOADS["5k"]))
    body["kv_transfer_params"] = {"prompt_token_ids": [5, 6, 7]}
    answer = json.loads(asked(engine, json.dumps(body, separators=(",", ":")).encode()))
    assert answer["prompt_token_ids"] == [5, 6, 7]
    assert answer["usage"]["prompt_tokens"] == 3


def test_a_stream_has_an_event_a_token(engine: MockEngine) -> None:
    load = LOADS["5k"]
    data = asked(engine, first_request(load, stream=True))
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    assert len(lines) == load.sampled + 3
    assert lines[-1] == b"[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    sampled = [number for chunk in chunks for c in chunk["choices"] for number in c.get("token_ids") or ()]
    assert sampled == ids(load.prompt, load.prompt + load.sampled)
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


def test_loads_count_answers_and_wait_for_late_ones(engine: MockEngine) -> None:
    body = first_request(LOADS["5k"], wait_ms=30)
    requests = [request(engine.port, body)] * 12
    closed = asyncio.run(closed_loop(engine.port, requests, 4))
    arriving = asyncio.run(open_loop(engine.port, requests, 400.0, seed=1))
    for timings in (closed, arriving):
        assert (len(timings.seconds), timings.failed) == (12, 0)
        assert min(timings.seconds) > 0.028


@pytest.mark.parametrize("name", ["chat", "responses", "messages", "google"])
def test_dialects_hold_the_same_conversation(name: str) -> None:
    path, body = in_dialect(name, first_request(LOADS["5k"]))
    assert path.startswith("/v1")
    assert len(body) > 0.8 * 1000 * LOADS["5k"].request_kb
    for part in ("[[prompt=5000 sampled=200", "tool_13", "module_1.py"):
        assert part in body.decode()
    assert MODEL in path + body.decode()


RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "codex": (
        "/v1/responses",
        {"instructions": "[placeholder 0badcafe, 30000 chars]", "stream": True, "tools": [],
         "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]}]},
    ),
    "claude": (
        "/v1/messages",
        {"model": "m", "max_tokens": 9, "stream": True, "system": "[placeholder 0badcafe, 30000 chars]",
         "messages": [{"role": "user", "content": "go"}]},
    ),
    "gemini": (
        "/v1beta/models/m:streamGenerateContent",
        {"systemInstruction": {"parts": [{"text": "[placeholder 0badcafe, 30000 chars]"}]},
         "contents": [{"role": "user", "parts": [{"text": "go"}]}]},
    ),
}  # fmt: skip


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Two programs' requests besides: a smaller first one, a refused one, a later one."""
    for program, (path, body) in RECORDED.items():
        texts = json.dumps(body)
        small, large = texts.replace("30000", "20000"), texts.replace("30000", "90000")
        lines = [
            {"method": "POST", "path": path, "n": n, "response": {"status": status}, "body": json.loads(sent)}
            for n, status, sent in ((0, 200, small), (0, 200, texts), (0, 500, large), (1, 200, large))
        ]
        (tmp_path / f"{program}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_recorded_requests_ask_for_the_same_as_a_chat_request_of_their_size(
    recordings: Path, engine: MockEngine
) -> None:
    load = LOADS["5k"]
    recorded = read_recorded(recordings, load)
    assert recorded.keys() == PROGRAMS.keys()
    for name, pair in recorded.items():
        assert 30_000 < len(pair.body) < 33_000  # line ends are escaped
        assert len(pair.body) == len(pair.chat_body)
        assert "stream" not in pair.path
        assert "[placeholder" not in pair.body.decode()
        for dialect, body in ((name, pair.body), ("chat", pair.chat_body)):
            asks = DIALECTS[dialect].parse_request(body, {}, "m")
            assert not asks.stream or dialect == "google"  # there the path says it
            sent, _ = engine_body(asks, SamplingSpec(), trainable=True, model=MODEL, stream=False)
            answer = load_call(asked(engine, json.dumps(sent, separators=(",", ":")).encode()))
            assert len(answer["prompt_token_ids"]) == load.prompt
            assert len(answer["choices"][0]["token_ids"]) == load.sampled


def test_without_all_recordings_there_are_none(recordings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_FIXTURES_DIR", str(recordings))
    assert fixtures() == recordings
    (recordings / "codex.jsonl").write_text("")
    with pytest.raises(LookupError, match=r"codex\.jsonl"):
        read_recorded(recordings, LOADS["5k"])
    (recordings / "gemini.jsonl").unlink()
    assert fixtures() is None
    monkeypatch.delenv("POLAR_FIXTURES_DIR")
    assert fixtures() is None


def test_the_given_recordings_can_be_read() -> None:
    folder = fixtures()
    if folder is None:
        pytest.skip("POLAR_FIXTURES_DIR names no folder of recorded programs: they are NOT read")
    for name, pair in read_recorded(folder, LOADS["5k"]).items():
        assert len(pair.body) == len(pair.chat_body) > 30_000
        asks = DIALECTS[name].parse_request(pair.body, {}, "m")
        assert "[[prompt=5000 sampled=200" in str(asks.messages[-1]["content"])
        assert asks.tools


def test_ids_of_a_session_cost_something() -> None:
    assert record_cpu_us(SessionLoad(calls=3, first_prompt=100, last_prompt=400, sampled=20)) > 0
