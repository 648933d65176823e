"""Laws of a gateway that serves: any body has an answer, any stream of an engine a true record."""

import asyncio
import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from schemas.calls import CallRecord, Delivery
from tests.unit.gateway.fake_engine import CLOSE, Answer, FakeEngine, running_engine
from tests.unit.gateway.running import RunningGateway, question, running_gateway

LAWS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PATHS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1beta/models/m:generateContent",
    "/v1beta/models/m:streamGenerateContent?alt=sse",
)
REASONED = {200, 400, 404, 413, 422, 429, 502, 503}


class Served:
    """A gateway and its engine in a thread of their own; the test talks to them like any client."""

    def __init__(self, folder: Any) -> None:
        self._folder = folder
        self._ready = threading.Event()
        self._stop: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.gateway: RunningGateway
        self.engine: FakeEngine
        self.key = ""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._thread.join(60)

    async def _run(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        async with (
            running_engine() as self.engine,
            # Every request is a call of its own: hypothesis repeats bodies.
            running_gateway(self._folder, self.engine.url, retry_seconds=0) as self.gateway,
        ):
            self.key = await self.gateway.open()
            self._ready.set()
            await stop.wait()

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        host, _, port = self.gateway.url.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        try:
            connection.request("POST", path, body, {"Authorization": f"Bearer {self.key}"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def calls(self) -> list[CallRecord]:
        """All records, once nothing is in flight any more."""
        parts = self.gateway.parts
        until = time.monotonic() + 10
        while parts.sessions.num_in_flight or parts.spool.num_records:
            assert time.monotonic() < until
            time.sleep(0.001)
        return self.gateway.log.calls()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("gateway")) as running:
        yield running


names = st.sampled_from(
    [
        "model", "messages", "input", "contents", "role", "content", "parts", "text", "type", "tools",
        "tool_choice", "stream", "max_tokens", "n", "system", "instructions", "function", "functionCall",
        "name", "arguments", "call_id", "tool_calls", "thinking", "response_format", "generationConfig",
        "stop", "temperature", "metadata", "reasoning", "output", "id", "source", "image_url",
    ]
)  # fmt: skip
words = st.sampled_from(
    ["user", "assistant", "system", "tool", "model", "message", "function_call", "function_call_output",
     "input_text", "text", "tool_use", "tool_result", "thinking", "image", "reasoning", "custom", "auto", ""]
)  # fmt: skip
leaves = (
    st.none() | st.booleans() | st.integers(-3, 5) | st.floats(allow_nan=False) | words | st.text(max_size=8)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
VALID: dict[str, Any] = {
    "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "input": "hi",
    "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
}  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Bytes of no form, JSON of no form, and valid requests with something else in them."""
    kind = draw(st.sampled_from(["bytes", "json", "near"]))
    if kind == "bytes":
        return draw(st.binary(max_size=64))
    if kind == "json":
        return json.dumps(draw(values)).encode()
    changed = VALID | draw(st.dictionaries(names, values, min_size=1, max_size=3))
    return json.dumps(changed).encode()


@pytest.mark.parametrize("path", PATHS)
@given(body=bodies())
@LAWS
def test_any_body_has_an_answer_with_a_reason(served: Served, path: str, body: bytes) -> None:
    before = len(served.calls())
    status, data = served.post(path, body)
    assert status in REASONED, (status, data)
    if status != 200:
        assert json.loads(data)["error"]["message"]
    made = served.calls()[before:]
    # What was dispatched is recorded, what was refused before is not.
    if status == 200:
        assert made
    assert all(record.delivery is not Delivery.CLIENT_ABORTED for record in made)
    assert served.gateway.parts.engines.slots["engine-0"].in_flight == 0


IDS = [*b"ok", CLOSE]


@st.composite
def mishaps(draw: st.DrawFn) -> tuple[list[int], int | None, bytes, str]:
    """(places to cut at, where it ends early, what is thrown in, how the connection ends)."""
    cuts = draw(st.lists(st.integers(1, 3000), max_size=12, unique=True).map(sorted))
    stop = draw(st.none() | st.integers(0, 3000))
    # A colon in front of a line makes a comment of it, which a stream may have.
    thrown_in = st.binary(min_size=1, max_size=12).filter(lambda data: b":" not in data)
    garbage = draw(st.just(b"") | thrown_in | st.just(b"\n\ndata: {}\n\n"))
    return cuts, stop, garbage, draw(st.sampled_from(["close", "reset"]))


@pytest.mark.parametrize("path", [path for path in PATHS if "generateContent" not in path])
@given(mishap=mishaps())
@example(mishap=([244], None, b"\x00", "close"))
@LAWS
def test_any_stream_of_an_engine_has_one_true_record(
    served: Served, path: str, mishap: tuple[list[int], int | None, bytes, str]
) -> None:
    cuts, stop, garbage, end = mishap
    chunks = served.engine.chunks({"model": "policy", **question()})
    frames = [chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode() for chunk in chunks]
    stream = b"".join(b"data: " + frame + b"\n\n" for frame in frames)
    whole = stop is None or stop >= len(stream)
    stream = stream[:stop]
    if garbage:
        place = cuts[0] if cuts else 0
        stream = stream[:place] + garbage + stream[place:]
    places = [0, *(cut for cut in cuts if cut < len(stream)), len(stream)]
    writes = [stream[a:b] for a, b in itertools.pairwise(places)]
    before = len(served.calls())
    served.engine.script = [Answer(writes=writes, end=end)]
    status, data = served.post(path, json.dumps(VALID | {"stream": True}).encode())
    (record,) = served.calls()[before:]
    assert status in REASONED
    assert record.sampled_ids.tolist() == IDS[: len(record.sampled_ids)]
    assert len(record.logprobs) == len(record.sampled_ids)
    if record.delivery is Delivery.DELIVERED:
        assert whole or b"[DONE]" in stream or record.finish_reason == "stop"
        assert record.untrainable is not None or record.sampled_ids.tolist() == IDS
    else:
        assert record.delivery is Delivery.UPSTREAM_ERROR
        assert record.error
        assert b"[DONE]" not in data
    if whole and not garbage and end == "close":
        assert (status, record.delivery, record.untrainable) == (200, Delivery.DELIVERED, None)
