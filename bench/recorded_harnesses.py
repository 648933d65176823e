"""Recorded traffic of real harnesses as sessions, tokenised with a real tokenizer.

    read_sessions(folder, tokenizer_folder)  → {"codex/basic": SessionLoad, …}
    read_requests(folder)                    → {"codex/basic": [ModelRequest, …], …}

`folder` holds one JSON-lines file a harness, one HTTP exchange a line (path, headers, body,
response). Requests go through the gateway's own dialects and its own recording, so marks, kinds
and deltas are what a gateway makes of them. What the recordings lack is filled in:

* `[placeholder HASH, N chars]` stands for text that was taken out; it becomes N characters of
  words, equal for equal hashes.
* A mock answered, so no ids were sampled: an answer is the message that came back in a later
  request, written as a model writes it (JSON arguments with spaces), tokenised by itself. Where
  the next prompt's tokens differ from it, they differ as they would behind an engine.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.workloads import SessionLoad
from polar.core.dialects.base import Dialect, ModelRequest
from polar.core.dialects.body import RequestError
from polar.core.dialects.chat import ChatDialect
from polar.core.dialects.engine_answer import Captured, CapturedChoice
from polar.core.dialects.google import GoogleDialect
from polar.core.dialects.messages import MessagesDialect
from polar.core.dialects.responses import ResponsesDialect
from polar.core.histories import canonical
from polar.core.recording import Dispatched, build_records
from polar.core.session_history import EncodedMessages, EncodedTools, SessionHistory
from schemas.calls import CallRecord, Delivery, SessionOpened, SessionSealed
from schemas.ids import session_id
from schemas.policies import BASE_VERSION
from schemas.sessions import Outcome

_PLACEHOLDER = re.compile(r"\[placeholder ([0-9a-f]{8}), (\d+) chars\]")
_WORDS = ("the", "agent", "reads", "a", "file", "and", "writes", "what", "it", "found", "into", "another")
_DONE = {"role": "assistant", "content": "Done."}


def read_sessions(folder: Path, tokenizer_folder: Path) -> dict[str, SessionLoad]:
    """One session a scenario, its calls in order of arrival; refused and broken ones are left out."""
    renderer = Renderer(tokenizer_folder)
    sessions = {}
    for number, (name, requests) in enumerate(read_requests(folder).items()):
        group_id = f"{name.split('/', maxsplit=1)[0]}-{number}"
        sessions[name] = _session(session_id(group_id, 0, 0, 1), requests, renderer)
    return sessions


def read_requests(folder: Path) -> dict[str, list[ModelRequest]]:
    """The answered requests of each scenario, as the gateway reads them."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        for scenario, exchanges in _scenarios(path).items():
            requests = list(_requests(exchanges))
            if requests:
                found[f"{path.stem}/{scenario}"] = requests
    return found


class Renderer:
    """A chat template and a tokenizer, as the engine uses them."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._known: dict[str, list[int]] = {}

    def prompt(self, request: ModelRequest) -> str:
        """The text that the engine would tokenise."""
        return self._render(request, request.messages, generation=True)

    def answer(self, request: ModelRequest, message: Mapping[str, Any]) -> str:
        """The text that a model would sample to give this message."""
        whole = self._render(request, [*request.messages, message], generation=False)
        prompt = self.prompt(request)
        if not whole.startswith(prompt):
            raise ValueError("the template does not extend its own prompt")
        return whole[len(prompt) :].removesuffix("\n")

    def ids(self, text: str) -> list[int]:
        """Token ids; equal texts are tokenised once."""
        if text not in self._known:
            self._known[text] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._known[text]

    def _render(
        self, request: ModelRequest, messages: Sequence[Mapping[str, Any]], *, generation: bool
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            [_for_template(message) for message in messages],
            tools=list(request.tools) or None,
            add_generation_prompt=generation,
            tokenize=False,
        )
        return _PLACEHOLDER.sub(lambda match: _prose(match[1], int(match[2])), str(text))


def _scenarios(path: Path) -> dict[str, list[dict[str, Any]]]:
    scenarios: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        exchange = json.loads(line)
        scenarios.setdefault(exchange["scenario"], []).append(exchange)
    return scenarios


def _requests(exchanges: Iterable[dict[str, Any]]) -> Iterator[ModelRequest]:
    for exchange in exchanges:
        if exchange["response"]["status"] != 200 or not isinstance(exchange["body"], dict):
            continue
        headers = {name.lower().encode(): value.encode() for name, value in exchange["headers"]}
        dialect, target = _dialect(exchange["path"])
        try:
            yield dialect.parse_request(json.dumps(exchange["body"]).encode(), headers, target)
        except RequestError:
            continue


def _dialect(path: str) -> tuple[Dialect, str]:
    if "/models/" in path:
        model, _, method = path.rpartition("/models/")[2].partition(":")
        return GoogleDialect(stream=method.startswith("stream")), model
    if path.endswith("/responses"):
        return ResponsesDialect(), ""
    return (MessagesDialect() if path.endswith("/messages") else ChatDialect()), ""


def _session(name: str, requests: Sequence[ModelRequest], renderer: Renderer) -> SessionLoad:
    history, records = SessionHistory(), []
    rng = np.random.default_rng(0)
    for index, request in enumerate(requests):
        message = _as_sampled(_answer(request, requests[index + 1 :]))
        sampled = renderer.ids(renderer.answer(request, message))
        logprobs = (-rng.exponential(0.5, len(sampled))).tolist()
        choice = CapturedChoice(
            list(sampled), logprobs, message, "tool_calls" if "tool_calls" in message else "stop"
        )
        captured = Captured(prompt_ids=list(renderer.ids(renderer.prompt(request))), choices={0: choice})
        call = Dispatched(
            session_id=name,
            group_id=name.split("/", maxsplit=1)[0],
            first_seq=index + 1,
            open_calls=(),
            request=request,
            messages=EncodedMessages.of(request.messages),
            tools=EncodedTools.of(request.tools),
            sampling_used={"temperature": 1.0},
            trainable=True,
            engine_id="bench",
            logprobs_mode="processed_logprobs",
            first_version=BASE_VERSION,
        )
        built = build_records(call, captured, history, last_version=BASE_VERSION, delivery=Delivery.DELIVERED)
        records += [CallRecord.model_validate_json(each.data) for each in built]
    return _load(name, records)


def _load(name: str, records: list[CallRecord]) -> SessionLoad:
    group_id = name.split("/", maxsplit=1)[0]
    return SessionLoad(
        SessionOpened(session_id=name, group_id=group_id, gateway_id="bench"),
        records,
        SessionSealed(session_id=name, group_id=group_id, calls=len(records), outcome=Outcome.COMPLETED),
        1.0,
    )


def _answer(request: ModelRequest, later: Iterable[ModelRequest]) -> dict[str, Any]:
    """The assistant message behind this request's messages in a later request."""
    mine = [canonical(message) for message in request.messages]
    for other in later:
        theirs = other.messages
        if (
            len(theirs) > len(mine)
            and theirs[len(mine)].get("role") == "assistant"
            and [canonical(message) for message in theirs[: len(mine)]] == mine
        ):
            return theirs[len(mine)]
    return _DONE


def _as_sampled(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": _spaced(call["function"].get("arguments"))}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _spaced(arguments: Any) -> Any:
    try:
        return json.dumps(json.loads(arguments)) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content)
    role = "system" if message.get("role") == "developer" else message.get("role")
    return {**message, "role": role, "content": content}


def _prose(name: str, size: int) -> str:
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    return " ".join(_WORDS[at] for at in rng.integers(0, len(_WORDS), size // 3 + 1))[:size]
