"""The benchmark's own parts: the mock engine says what is asked of it, the load finds the ends of answers."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator

import pytest

from bench.gateway.deployment import MockEngine
from bench.gateway.load import Client, closed_loop, open_loop, request
from bench.gateway.workload import LOADS, MODEL, continuing_request, first_request, ids, in_dialect, text
from polar.core.dialects.engine_answer import load_call
from polar.core.token_text import TokenText


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
