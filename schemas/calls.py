"""polar.calls.v1: one record per model call, between SessionOpened and SessionSealed."""

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from schemas.base import Event, WireModel
from schemas.columns import FloatColumn, TokenTextColumn
from schemas.ids import call_id
from schemas.policies import PolicyInterval
from schemas.sessions import Outcome
from schemas.tasks import SamplingSpec


class Delivery(StrEnum):
    """What became of the answer."""

    DELIVERED = "delivered"
    CLIENT_ABORTED = "client_aborted"
    UPSTREAM_ERROR = "upstream_error"
    """The engine refused, broke off or answered an error; no complete answer exists."""


Relation = Literal[
    "first", "extended", "drifted", "arguments_reserialized", "truncated", "retry", "edited",
    "thinking_stripped", "tools_changed", "system_changed", "compaction", "subagent", "restarted",
]  # fmt: skip
"""How a request stands to the earlier calls of its session."""

Rendering = Literal["engine", "spliced", "repeated", "local"]
"""Who made the prompt's ids: the engine from messages, or the gateway (earlier ids continued,
earlier ids again, messages rendered)."""


class SessionOpened(Event):
    """Opens the key: acknowledged before any other record of the session is written."""

    type: Literal["SessionOpened"] = "SessionOpened"
    session_id: str
    group_id: str
    gateway_id: str
    sampling: SamplingSpec = SamplingSpec()
    trainable: bool = True


class PromptDelta(WireModel):
    """The engine's prompt ids, relative to an earlier call of the session."""

    base_call: int | None = None
    """seq of the base call; none: `new_ids` is the whole prompt."""
    kept: Annotated[int, Field(ge=0)] = 0
    """Leading tokens of (base prompt + base sampled ids) that this prompt starts with."""
    new_ids: TokenTextColumn
    """[n] ids after the kept ones."""

    @model_validator(mode="after")
    def _kept_needs_base(self) -> Self:
        if self.base_call is None and self.kept:
            raise ValueError("prompt.kept > 0 needs prompt.base_call")
        return self


class MediaPart(WireModel):
    """A picture, a sound or another part of the prompt that is no text, by reference."""

    position: Annotated[int, Field(ge=0)]
    """Index in the whole prompt of the first token that stands for the part."""
    digest: str | None = None
    """SHA-256 (hex) of the part's bytes, its name in whatever store keeps them; none where nothing
    is known of them, and the call cannot be trained (`media_missing`)."""


class MessagesDelta(WireModel):
    """The request's messages (canonical chat form), relative to an earlier call."""

    base_call: int | None = None
    kept: Annotated[int, Field(ge=0)] = 0
    """Leading messages equal to those of the base call's request."""
    new: tuple[dict[str, Any], ...] = ()
    digest: str
    """Digest over the SHA-256 of each message of the whole list."""


class ToolsDelta(WireModel):
    """The request's tools: in full when new to the session, else by digest."""

    digest: str
    """Digest of the tool list; of an empty list when there are none."""
    tools: tuple[dict[str, Any], ...] | None = None
    """None: as in the earlier call of the session with the same digest."""


class Usage(WireModel):
    """Token counts as the engine reported them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None


class Continuity(WireModel):
    """How the prompt of a call came about, as the gateway decided it at dispatch."""

    relation: Relation
    rendering: Rendering
    parent: int | None = None
    """seq of the call whose prompt and sampled ids this prompt begins with."""
    cut_tokens: Annotated[int, Field(ge=0)] = 0
    """Sampled ids at the parent's end that its harness never saw: this prompt leaves them out."""
    why_engine: str = ""
    """With rendering `engine`: why the gateway did not make the ids."""


class CallRecord(Event):
    """One LLM exchange with the exact ids and log-probs of the engine."""

    type: Literal["CallRecord"] = "CallRecord"
    call_id: str
    session_id: str
    group_id: str
    seq: Annotated[int, Field(ge=1)]
    """Number of the call in its session, from 1, in order of dispatch, without gaps."""
    thread_id: str = ""
    """Agent or sub-agent inside the session, where the harness tells."""
    native_ids: dict[str, str] = {}
    dialect: Literal["chat", "responses", "messages", "google"] = "chat"
    kind: Literal["agent", "subagent", "compaction", "auxiliary"] = "agent"
    request_digest: str
    """Digest of the request body (XXH3, 128 bits, hex); equal bodies are retries or deliberate repeats."""
    choice_index: int = 0
    open_calls: tuple[int, ...] = ()
    """seqs of this session's calls that were in flight at dispatch."""

    continuity: Continuity | None = None
    """None in records of calls that were never planned."""
    prompt: PromptDelta
    media: tuple[MediaPart, ...] = ()
    """Parts among `prompt.new_ids`, by position; those of the kept tokens stand with the base."""
    sampled_ids: TokenTextColumn
    """[s] ids as sampled, stop token included."""
    logprobs: FloatColumn
    """[s] natural log-probs of the sampled ids; NaN where the engine gave none."""
    logprobs_mode: str = "processed_logprobs"
    """Which distribution the log-probs are of (vLLM's --logprobs-mode); `unverified` where nobody saw it."""
    policy: PolicyInterval
    engine_id: str
    engine_request_id: str = ""
    """The engine's id of the answer (chatcmpl-…)."""

    messages: MessagesDelta
    tools: ToolsDelta
    notes: tuple[str, ...] = ()
    """What of the request the canonical form leaves out, in words."""
    answer: dict[str, Any] = {}
    """Assistant message as delivered to the harness."""
    model_asked: str = ""
    sampling_asked: dict[str, Any] = {}
    """Sampling fields as the harness sent them."""
    sampling_used: dict[str, Any] = {}
    """Sampling fields as sent to the engine; `temperature` is always there."""
    finish_reason: str | None = None
    usage: Usage | None = None
    stream: bool = False
    delivery: Delivery
    untrainable: str | None = None
    """Why this call must not be trained, known at capture: `constrained_sampling`,
    `ids_incomplete`, `auxiliary`, … None where nothing speaks against it."""
    error: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.call_id != call_id(self.session_id, self.seq):
            raise ValueError("call_id is not session_id#seq")
        if len(self.sampled_ids) != len(self.logprobs):
            raise ValueError("sampled_ids and logprobs differ in length")
        start = self.prompt.kept
        if not all(start <= part.position < start + len(self.prompt.new_ids) for part in self.media):
            raise ValueError("media.position must lie among prompt.new_ids")
        return self


class SessionSealed(Event):
    """Closes the key, behind the last call on the same partition."""

    type: Literal["SessionSealed"] = "SessionSealed"
    session_id: str
    group_id: str
    calls: Annotated[int, Field(ge=0)]
    """Number of CallRecords of the session."""
    outcome: Outcome
    reason: str = ""


class SessionAbandoned(Event):
    """Closes the key of a session whose gateway did not come back; written by the scheduler."""

    type: Literal["SessionAbandoned"] = "SessionAbandoned"
    session_id: str
    group_id: str
    reason: str
