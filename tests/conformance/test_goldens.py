"""Requests in the shapes of real harnesses and what they mean; one answer in every dialect's bytes.

The goldens were read by a person. A change of one is a change of what a model sees, of what a
record says, or of what a harness gets.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from polar.core.dialects.base import ModelRequest
from polar.core.dialects.engine_answer import Captured, read_answer
from polar.core.dialects.engine_body import engine_body
from polar.core.recording import Dispatched, build_records
from polar.core.session_history import EncodedMessages, EncodedTools, SessionHistory
from schemas.calls import Delivery
from schemas.policies import BASE_VERSION
from schemas.tasks import SamplingSpec
from tests.conformance.converting import convert, wire
from tests.conformance.reading import DIALECTS
from tests.conformance.scripted import Say, stream_of, whole_of

GOLDENS = Path(__file__).with_name("goldens")
REQUESTS = ("codex", "claude", "gemini", "gemini_router", "mini", "opencode")
SAID = Say("Two files.", "Count.", [("bash", '{"command": "ls"}'), ("patch", '{"input": "x"}')])


def told(case: dict[str, Any]) -> dict[str, Any]:
    """What the engine is asked for, and what the record says beside."""
    headers = {name.encode(): value.encode() for name, value in case["headers"].items()}
    raw = json.dumps(case["body"]).encode()
    request = DIALECTS[case["dialect"]].parse_request(raw, headers, case["target"])
    body, used = engine_body(request, SamplingSpec(), trainable=True, model="policy")
    call = Dispatched(
        session_id="t/0/0/1", group_id="t", first_seq=1, open_calls=(), request=request,
        messages=EncodedMessages.of(request.messages), tools=EncodedTools.of(request.tools),
        sampling_used=used, trainable=True, engine_id="engine-0",
        logprobs_mode="processed_logprobs", first_version=BASE_VERSION,
    )  # fmt: skip
    (built,) = build_records(
        call, Captured(), SessionHistory(), last_version=BASE_VERSION, delivery=Delivery.CLIENT_ABORTED
    )
    names = (
        "thread_id",
        "native_ids",
        "dialect",
        "kind",
        "notes",
        "model_asked",
        "sampling_asked",
        "untrainable",
    )
    left_out = ("logprobs", "top_logprobs", "return_token_ids", "model")
    record = json.loads(built.data)
    return {
        "engine": {name: value for name, value in body.items() if name not in left_out},
        "record": {name: record[name] for name in names},
    }


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_means_what_it_meant(name: str) -> None:
    case = json.loads((GOLDENS / f"{name}.json").read_text())
    assert json.loads(json.dumps(told(case))) == case["canonical"]


def answering(name: str) -> ModelRequest:
    """A request whose answer needs all that a dialect has."""
    tools: dict[str, Any] = {
        "responses": {"input": "hi", "include": ["reasoning.encrypted_content"],
                      "tools": [{"type": "custom", "name": "patch"}]},
        "google": {"contents": [{"parts": [{"text": "hi"}]}],
                   "generationConfig": {"thinkingConfig": {"includeThoughts": True}}},
    }  # fmt: skip
    body = tools.get(name, {"messages": [{"role": "user", "content": "hi"}]})
    options = {"include_usage": True}
    raw = json.dumps({"model": "asked", "stream": True, "stream_options": options, **body}).encode()
    return DIALECTS[name].parse_request(raw, {}, "asked")


@pytest.mark.parametrize("name", DIALECTS)
def test_an_answer_has_the_bytes_it_had(name: str) -> None:
    request = answering(name)
    data, _ = convert(DIALECTS[name], request, wire(stream_of([SAID])))
    assert data.decode() == (GOLDENS / f"answer_{name}.sse").read_text()
    captured, body = read_answer(json.dumps(whole_of([SAID])).encode(), request)
    whole = json.loads(DIALECTS[name].answer(request, body, captured))
    assert whole == json.loads((GOLDENS / f"answer_{name}.json").read_text())
