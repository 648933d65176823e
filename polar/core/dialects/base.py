"""What the dialects have in common: one form of a request, one interface.

    bytes of a harness ── parse_request ──▶ ModelRequest ── engine_body ──▶ engine
    bytes for the harness ◀── answer, stream ── chat answer or chunks without ids ◀── engine

The engine side (`engine_body`, `engine_answer`, `engine_stream`) knows no dialect, a dialect knows
no engine; between them everything has the form of chat completions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from polar.core.dialects.engine_answer import Captured
from polar.core.dialects.errors import ApiError
from polar.core.session_history import EncodedMessages, EncodedTools

DialectName = Literal["chat", "responses", "messages", "google"]
CallKind = Literal["agent", "subagent", "compaction", "auxiliary"]
Headers = Mapping[bytes, bytes]
"""Names in lower case."""


@dataclass(frozen=True, slots=True)
class AskedTool:
    """A tool that is not a plain function for the harness, though it is one for the engine."""

    kind: Literal["function", "custom", "local_shell"]
    name: str
    """Its name for the harness."""
    namespace: str = ""
    is_eager: bool = False
    """Its arguments are streamed as they come, valid or not."""


class ModelRequest(msgspec.Struct, frozen=True):
    """A request in canonical chat form.

    Messages are what the engine's chat template gets, up to two steps that the engine takes
    itself (role `developer` is rendered as `system`, the JSON text of arguments as a mapping):

    * `content` is a text. Text parts are joined by a line end, null and absent are the empty
      text; only with other parts (images) it stays a list of chat's content parts.
    * An assistant message has `reasoning` (never empty) and `tool_calls` (never empty) where there
      are any; the arguments of a call are the text that came, or what a chat client sent instead.
    * A tool message has `tool_call_id`.
    """

    dialect: DialectName
    fields: Mapping[str, Any]
    """Sampling, limits, constraints and template options under chat's names."""
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Function tools in chat's form."""
    model: str = ""
    """Name that the harness asked for, and reads back."""
    stream: bool = False
    choices: int = 1
    """How many answers are asked for."""
    include_usage: bool = False
    """Chat: a stream's usage chunk belongs to the harness's view."""
    continuous_usage: bool = False
    hide_reasoning: bool = False
    single_tool_call: bool = False
    """Of parallel tool calls the harness gets the first."""
    constrained: bool = False
    """A grammar shapes the answer: structured output or a forced tool choice."""
    digest: str = ""
    """Digest of the body's bytes; equal bodies are retries or deliberate repeats."""
    native_ids: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The harness's own ids and marks: session, thread, turn, kind of harness."""
    thread_id: str = ""
    """Agent or sub-agent inside the session, where the harness tells."""
    kind: CallKind = "agent"
    notes: tuple[str, ...] = ()
    """What the canonical form leaves out, in words."""
    asked_tools: Mapping[str, AskedTool] = msgspec.field(default_factory=dict)
    """By the name that the engine knows."""
    echoed: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Fields that the answer repeats, or that shape it, in the dialect's own form."""
    known_messages: EncodedMessages | None = None
    """What is encoded of the messages, where that is known already."""
    known_tools: EncodedTools | None = None

    def encoded_messages(self) -> EncodedMessages:
        """What is encoded of the messages."""
        return self.known_messages or EncodedMessages.of(self.messages)

    def encoded_tools(self) -> EncodedTools:
        """What is encoded of the tools."""
        return self.known_tools or EncodedTools.of(self.tools)


def answer_id(request: ModelRequest, captured: Captured) -> str:
    """Names an answer, without a prefix: by the engine's id, else by the request's digest."""
    return captured.engine_request_id.removeprefix("chatcmpl-") or request.digest[:24]


class ClientStream(Protocol):
    """The events of one streamed answer.

    Invariant: what ends an answer is only in `ending` (or `failure`), so nobody takes an answer
    for whole before it is recorded.
    """

    def on_chunk(self, chunk: dict[str, Any]) -> bytes:
        """Bytes to send at once. Raises what `engine_answer.MALFORMED` lists."""

    def ending(self) -> bytes:
        """What ends the answer; called once, after its record is durable."""

    def failure(self, error: ApiError) -> bytes:
        """How the stream tells that it broke off."""


class Dialect(Protocol):
    """One provider's protocol."""

    name: DialectName
    keep_alive: bytes
    """What may be sent while nothing comes, before the first event too; empty: only headers."""

    def parse_request(self, raw: bytes, headers: Headers, target: str) -> ModelRequest:
        """Read a body; `target` is the part of the URL behind `models/`, where there is one.

        Raises RequestError naming what is wrong.
        """

    def answer(self, request: ModelRequest, body: dict[str, Any], captured: Captured) -> bytes:
        """A whole answer from a chat answer without ids, which may be changed on the way."""

    def stream(self, request: ModelRequest, captured: Captured) -> ClientStream:
        """A streamed answer; `captured` grows while its chunks come."""

    def error(self, error: ApiError) -> bytes:
        """The body of an error."""

    def counted(self, tokens: int) -> bytes:
        """The answer to a question for the number of prompt tokens."""

    def models(self, name: str, created: int) -> bytes:
        """The list of models, which is one."""

    def model(self, name: str, created: int) -> bytes:
        """One model; any name is served."""
