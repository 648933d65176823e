"""A server that speaks vLLM's HTTP form and lets the scripted model answer.

Real ids all the way: prompts are rendered and encoded, or taken as they come in
`kv_transfer_params.prompt_token_ids`; every sampled token has its id and log-prob in the answer,
streamed or not. Tool calls are parsed as vLLM's hermes parser does: streamed arguments are the
sampled text, unstreamed ones are dumped anew, and a call that is no JSON stays text.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.harness.script import BrokenStream, Conversation, Refusal, Script, Turn
from tests.harness.scripted_model import Piece, ScriptedModel

MODEL = "policy"
_TOP_LOGITS = {"token_id:65": 2.0, "token_id:66": 1.5, "token_id:67": 0.5}


@dataclass(slots=True)
class EngineCall:
    """One chat call as the engine saw it."""

    name: str
    """X-Polar-Call: session id # number."""
    scene: str
    number: int
    """Which turn of the scene."""
    body: dict[str, Any]
    prompt_ids: list[int]
    were_ids_sent: bool
    """The prompt came as ids."""
    sampled_ids: list[int] = field(default_factory=list)
    """As far as they were sent."""
    is_whole: bool = False


def logprob(token: int) -> float:
    """The log-prob of every sampled token: exact in float32."""
    return -(1 + token % 63) / 64


class ScriptedEngine:
    """See the module; `script` is set by each test."""

    def __init__(self, model: ScriptedModel) -> None:
        self.model = model
        self.script = Script([])
        self.max_model_len = 131072
        self.calls: list[EngineCall] = []
        self.errors: list[str] = []
        """Requests that the script or the model could not take."""
        self.url = ""

    def app(self) -> web.Application:
        """The routes that a gateway uses."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.get("/health", self._empty),
                web.get("/version", self._version),
                web.get("/weight_info", self._weights),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/chat/completions/render", self._render),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
            ]
        )
        return app

    async def _empty(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _weights(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default"})

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [model]})

    async def _render(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"token_ids": self._rendered(body), "model": MODEL})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.model.encode(body["prompt"]) if "prompt" in body else self._rendered(body)
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": self.model.decode((await request.json())["tokens"])})

    def _rendered(self, body: dict[str, Any]) -> list[int]:
        kwargs = body.get("chat_template_kwargs") or {}
        return self.model.render(body["messages"], body.get("tools"), **kwargs)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = list(given) if given else self._rendered(body)
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 1
        if len(prompt) + limit > self.max_model_len:
            return _error(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{len(prompt) + limit} tokens ({len(prompt)} in the messages, {limit} in the completion).",
            )
        if request.headers.get("X-Polar-Purpose") == "probe":
            call = EngineCall("probe", "probe", 0, body, prompt, bool(given))
            return await self._say(request, call, Turn(text="Green.", reasoning="A colour."))
        try:
            conversation = Conversation(self.model.decode(prompt), body.get("tools") or ())
            scene = self.script.scene(conversation)
        except AssertionError as error:
            self.errors.append(str(error))
            return _error(400, str(error))
        number, happens = scene.play(conversation)
        call = EngineCall(
            request.headers.get("X-Polar-Call", ""), scene.name, number, body, prompt, bool(given)
        )
        self.calls.append(call)
        if isinstance(happens, Refusal):
            return _error(happens.status, happens.message, dict(happens.headers))
        if isinstance(happens, BrokenStream):
            return await self._say(
                request, call, scene.turn(number, conversation), break_after=happens.num_pieces
            )
        return await self._say(request, call, happens)

    async def _say(
        self, request: web.Request, call: EngineCall, turn: Turn, break_after: int | None = None
    ) -> web.StreamResponse:
        pieces = self.model.sample(turn)
        if break_after is not None:
            pieces = pieces[:break_after]
        elif not turn.is_cut:
            pieces.append(Piece((self.model.eos,), "markup", ""))
        finish = "length" if turn.is_cut else "tool_calls" if turn.calls else "stop"
        if call.body.get("stream"):
            return await self._stream(request, call, pieces, finish, breaks=break_after is not None)
        if break_after is not None:
            return await self._half(request, call, turn)
        return self._whole(call, pieces, finish)

    async def _stream(
        self, request: web.Request, call: EngineCall, pieces: list[Piece], finish: str, *, breaks: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        head = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        await _event(response, self._chunk(call, [head], prompt_token_ids=call.prompt_ids))
        begun: set[int] = set()
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1 and not breaks
            choice = {
                "index": 0,
                "delta": _delta(piece, begun),
                "logprobs": {"content": _entries(piece.ids)},
                "finish_reason": finish if is_last else None,
                "stop_reason": None,
                "token_ids": list(piece.ids),
            }
            await _event(response, self._chunk(call, [choice]))
            call.sampled_ids += piece.ids
        if breaks:
            await asyncio.sleep(0.05)  # what was sent shall arrive
            _hang_up(request)
            return response
        if (call.body.get("stream_options") or {}).get("include_usage"):
            await _event(response, self._chunk(call, [], usage=_usage(call)))
        call.is_whole = True
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _half(self, request: web.Request, call: EngineCall, turn: Turn) -> web.StreamResponse:
        """An unstreamed answer that breaks off; nothing of it can be read."""
        data = self._whole(call, self.model.sample(turn), "stop").body
        call.is_whole = False
        assert isinstance(data, bytes)
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        await asyncio.sleep(0.05)
        _hang_up(request)
        return response

    def _whole(self, call: EngineCall, pieces: list[Piece], finish: str) -> web.Response:
        call.sampled_ids = [token for piece in pieces for token in piece.ids]
        call.is_whole = True
        message = _message(pieces)
        if finish == "tool_calls" and not message["tool_calls"]:
            finish = "stop"
        entries = _entries(call.sampled_ids)
        if call.body.get("top_logprobs"):
            entries[0]["top_logprobs"] = _top_logprobs(call.body)
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": entries},
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": call.sampled_ids,
        }
        body = self._chunk(call, [choice], prompt_token_ids=call.prompt_ids, usage=_usage(call))
        return web.json_response(body | {"object": "chat.completion"})

    def _chunk(self, call: EngineCall, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{len(self.calls)}",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": MODEL,
            "choices": choices,
            **more,
        }


def _delta(piece: Piece, begun: set[int]) -> dict[str, Any]:
    """What the parser lets through of a piece."""
    if piece.kind in ("content", "reasoning"):
        return {piece.kind: piece.text}
    if piece.kind != "arguments":
        return {}
    function: dict[str, Any] = {"arguments": piece.text}
    delta: dict[str, Any] = {"index": piece.call, "function": function}
    if piece.call not in begun:
        begun.add(piece.call)
        delta |= {"id": _call_id(), "type": "function"}
        function["name"] = piece.tool
    return {"tool_calls": [delta]}


def _message(pieces: list[Piece]) -> dict[str, Any]:
    """The parsed message of an unstreamed answer."""
    texts = {kind: "".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "content")}
    calls: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.kind == "arguments":
            calls.setdefault(piece.call, []).append(piece)
    parsed = []
    try:
        for parts in calls.values():
            arguments = json.dumps(json.loads("".join(part.text for part in parts)), ensure_ascii=False)
            function = {"name": parts[0].tool, "arguments": arguments}
            parsed.append({"id": _call_id(), "type": "function", "function": function})
    except ValueError:
        parsed = []
        texts["content"] = "".join(piece.text for piece in pieces if piece.kind != "reasoning")
    message: dict[str, Any] = {"role": "assistant", "content": texts["content"] or None, "tool_calls": parsed}
    if texts["reasoning"]:
        message["reasoning"] = texts["reasoning"]
    return message


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


def _entries(ids: Any) -> list[dict[str, Any]]:
    return [
        {"token": f"token_id:{token}", "logprob": logprob(token), "bytes": None, "top_logprobs": []}
        for token in ids
    ]


def _top_logprobs(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the first token, scaled as `--logprobs-mode processed_logprobs` does."""
    temperature = body.get("temperature", 1.0)
    return [
        {"token": token, "logprob": logit / temperature - 5.0, "bytes": None}
        for token, logit in _TOP_LOGITS.items()
    ]


def _usage(call: EngineCall) -> dict[str, Any]:
    prompt, sampled = len(call.prompt_ids), len(call.sampled_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}
    return web.json_response(body, status=status, headers=headers)


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def _event(response: web.StreamResponse, value: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


@asynccontextmanager
async def serving(engine: ScriptedEngine) -> AsyncIterator[None]:
    """The engine on a free port."""
    runner = web.AppRunner(engine.app(), access_log=None, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    engine.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    try:
        yield
    finally:
        await runner.cleanup()
