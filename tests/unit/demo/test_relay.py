"""The relay keeps every raw engine answer, before its end is forwarded, and changes nothing."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polar.demo.relay import make_app
from polar.demo.witness import read_answers

ANSWER = {
    "id": "chatcmpl-1",
    "prompt_token_ids": [1, 2],
    "choices": [
        {"token_ids": [3, 4], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5}]}, "message": {}}
    ],
}
CHUNKS = [
    {"id": "chatcmpl-2", "prompt_token_ids": [7], "choices": []},
    {
        "id": "chatcmpl-2",
        "choices": [
            {
                "token_ids": [8],
                "logprobs": {"content": [{"logprob": -1.0}]},
                "finish_reason": None,
                "delta": {},
            }
        ],
    },
    {
        "id": "chatcmpl-2",
        "choices": [
            {
                "token_ids": [9],
                "logprobs": {"content": [{"logprob": -2.0}]},
                "finish_reason": "stop",
                "delta": {},
            }
        ],
    },
]


class Engine:
    """A fake engine whose stream goes on only when the test says so."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.end = asyncio.Event()
        self.seen: list[dict[str, str]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/pause", self.pause)
        return app

    async def pause(self, request: web.Request) -> web.Response:
        return web.json_response({"status": request.query["mode"]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(dict(request.headers))
        if not (await request.json()).get("stream"):
            return web.json_response(ANSWER)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in CHUNKS[:2]:
            await response.write(f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode())
        await self.go_on.wait()
        await response.write(f"data: {json.dumps(CHUNKS[2], separators=(',', ':'))}\n\n".encode())
        await self.end.wait()
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audit" / "answers.jsonl"


@pytest.fixture
def torn_file(file: Path) -> Path:
    file.parent.mkdir(parents=True)
    file.write_bytes(b'{"n": 5, "at": 1.0, "bod')
    return file


@pytest.fixture
async def engine():
    return Engine()


@pytest.fixture
async def relay(engine: Engine, file: Path):
    async with TestServer(engine.app()) as upstream:
        server = TestServer(make_app(str(upstream.make_url("")), file))
        async with server:
            yield server
        engine.go_on.set()
        engine.end.set()


async def test_an_answer_is_kept_with_what_its_asker_said(
    relay: TestServer, engine: Engine, file: Path
) -> None:
    headers = {"X-Polar-Purpose": "call", "X-Polar-Call": "t/0/0/1#1", "Authorization": "Bearer x"}
    async with aiohttp.ClientSession() as client:
        answer = await client.post(relay.make_url("/v1/chat/completions"), json={}, headers=headers)
        assert await answer.json() == ANSWER
    assert engine.seen[0]["Authorization"] == "Bearer x"
    async with asyncio.timeout(5):
        while not read_answers(file)[0].forwarded:  # noqa: ASYNC110  (noted after the end was sent)
            await asyncio.sleep(0.01)
    [kept] = read_answers(file)
    assert (kept.purpose, kept.call, kept.status) == ("call", "t/0/0/1#1", 200)
    assert kept.complete
    assert (kept.response_id, kept.prompt_ids, kept.token_ids) == ("chatcmpl-1", (1, 2), (3, 4))
    assert kept.logprobs == (-0.5, -1.5)
    assert "Bearer" not in str(kept)


async def test_a_stream_flows_but_its_end_waits_for_the_disk(
    relay: TestServer, engine: Engine, file: Path
) -> None:
    async with aiohttp.ClientSession() as client:
        answer = await client.post(relay.make_url("/v1/chat/completions"), json={"stream": True})
        first = await answer.content.readuntil(b"\n\n") + await answer.content.readuntil(b"\n\n")
        assert b'"token_ids":[8]' in first
        assert read_answers(file) == []
        engine.go_on.set()
        with pytest.raises(TimeoutError):
            # The chunk with the finish reason is held: nothing of the end is on disk yet.
            await asyncio.wait_for(answer.content.readany(), 0.2)
        engine.end.set()
        rest = await answer.content.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        [kept] = read_answers(file)
    assert kept.complete
    assert (kept.prompt_ids, kept.token_ids, kept.logprobs) == ((7,), (8, 9), (-1.0, -2.0))


async def test_an_asker_that_goes_away_leaves_an_incomplete_answer(
    engine: Engine, file: Path, tmp_path: Path
) -> None:
    async with TestServer(engine.app()) as upstream:
        runner = web.AppRunner(make_app(str(upstream.make_url("")), file), handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as client:
            answer = await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={"stream": True})
            await answer.content.readuntil(b"\n\n")
            answer.close()
        async with asyncio.timeout(10):
            while not read_answers(file):  # noqa: ASYNC110  (written by the server)
                await asyncio.sleep(0.02)
        [kept] = read_answers(file)
        assert (kept.complete, kept.forwarded, kept.response_id) == (False, False, "chatcmpl-2")
        engine.go_on.set()
        engine.end.set()
        await runner.cleanup()


async def test_other_routes_pass_through_unrecorded(relay: TestServer, file: Path) -> None:
    async with aiohttp.ClientSession() as client:
        answer = await client.post(relay.make_url("/pause").update_query(mode="keep"))
        assert await answer.json() == {"status": "keep"}
        missing = await client.get(relay.make_url("/nothing"))
        assert missing.status == 404
    assert read_answers(file) == []


async def test_an_engine_that_is_down_is_502(tmp_path: Path) -> None:
    server = TestServer(make_app("http://127.0.0.1:1", tmp_path / "a.jsonl"))
    async with server, aiohttp.ClientSession() as client:
        answer = await client.post(server.make_url("/v1/chat/completions"), json={})
        assert answer.status == 502


async def test_a_line_torn_by_kill_9_spoils_only_itself(engine: Engine, torn_file: Path) -> None:
    async with (
        TestServer(engine.app()) as upstream,
        TestServer(make_app(str(upstream.make_url("")), torn_file)) as server,
        aiohttp.ClientSession() as client,
    ):
        await client.post(server.make_url("/v1/chat/completions"), json={})
    assert [answer.response_id for answer in read_answers(torn_file)] == ["chatcmpl-1"]
