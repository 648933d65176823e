"""From a finished call to its CallRecord, delta-encoded against earlier calls of the session.

Invariant: every reserved number gives exactly one record, whatever became of the call, and a
record's bases are calls whose records were built (hence spooled) before it. Deltas save space
only: without a history the same record comes out whole.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar.core.dialects.base import ModelRequest
from polar.core.dialects.engine_answer import Captured, CapturedChoice
from polar.core.dialects.engine_body import sampling_asked
from schemas.base import canonical_json, digest, encode
from schemas.calls import CallRecord, Delivery, MessagesDelta, PromptDelta, ToolsDelta, Usage
from schemas.columns import FloatColumn, TokenColumn
from schemas.ids import call_id
from schemas.policies import PolicyInterval, PolicyVersion
from schemas.topics import CALLS

BASES = 8
"""Earlier calls that are tried as a base: enough for a few interleaved sub-agents."""
MAX_TOOL_LISTS = 64
MAX_RECORD_BYTES = CALLS.max_message_bytes - 4096
"""The topic's limit counts key and headers too."""
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A call as it was sent to the engine."""

    session_id: str
    group_id: str
    first_seq: int
    """seq of choice 0; choice i has first_seq + i."""
    open_calls: tuple[int, ...]
    request: ModelRequest
    sampling_used: dict[str, Any]
    trainable: bool
    engine_id: str
    first_version: PolicyVersion


@dataclass(frozen=True, slots=True)
class _Base:
    seq: int
    ids: bytes
    """Packed prompt + sampled ids."""
    messages: tuple[bytes, ...]
    """SHA-256 per message of the request."""

    @property
    def size_bytes(self) -> int:
        return len(self.ids) + 64 * len(self.messages)


@dataclass(slots=True)
class SessionHistory:
    """What deltas of a session are made against; bounded, and dispensable."""

    _bases: deque[_Base] = field(default_factory=lambda: deque(maxlen=BASES))
    _tool_lists: set[str] = field(default_factory=set)
    """Digests of lists that stand in full in a record of the session."""
    _tool_digests: dict[bytes, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Memory held, roughly."""
        return sum(base.size_bytes for base in self._bases)

    def prompt(self, ids: TokenColumn) -> PromptDelta:
        """The prompt against the call that shares the longest prefix (ties: the latest)."""
        best, kept = None, 0
        for base in self._bases:
            shared = common_prefix(base.ids, ids.data)
            if shared >= max(kept, 1):
                best, kept = base.seq, shared
        return PromptDelta(base_call=best, kept=kept, new_ids=ids[kept:])

    def messages(self, messages: Sequence[dict[str, Any]], encoded: Sequence[bytes]) -> MessagesDelta:
        """The messages against the call that shares most of them; `encoded`: canonical JSON of each."""
        marks = _marks(encoded)
        best, kept = None, 0
        for base in self._bases:
            shared = _common_messages(base.messages, marks)
            if shared >= max(kept, 1):
                best, kept = base.seq, shared
        return MessagesDelta(base_call=best, kept=kept, new=tuple(messages[kept:]), digest=digest(*encoded))

    def tools(self, tools: Sequence[dict[str, Any]]) -> ToolsDelta:
        """The tools, in full only the first time."""
        # The same list comes with every call; its canonical form costs far more than this look-up.
        mark = hashlib.sha256(orjson.dumps(tools)).digest()
        name = self._tool_digests.get(mark)
        if name is None:
            if len(self._tool_digests) >= MAX_TOOL_LISTS:
                self._tool_digests.clear()
            name = self._tool_digests[mark] = digest(*map(canonical_json, tools))
        return ToolsDelta(digest=name, tools=None if name in self._tool_lists else tuple(tools))

    def remember(self, record: CallRecord, prompt: TokenColumn, encoded: Sequence[bytes]) -> None:
        """Make a recorded call a base for later ones."""
        self._bases.append(_Base(record.seq, prompt.data + record.sampled_ids.data, _marks(encoded)))
        if record.tools.tools is not None and len(self._tool_lists) < MAX_TOOL_LISTS:
            self._tool_lists.add(record.tools.digest)


def build_records(
    call: Dispatched,
    captured: Captured,
    history: SessionHistory,
    *,
    last_version: PolicyVersion,
    delivery: Delivery,
    error: str = "",
) -> list[CallRecord]:
    """One record per choice asked for, in order of seq; `history` learns them."""
    encoded = [canonical_json(message) for message in call.request.messages]
    prompt = _token_column(captured.prompt_ids)
    complete = prompt is not None and captured.is_complete()
    records = []
    for index in range(call.request.choices):
        choice = captured.choices.get(index) or CapturedChoice()
        sampled = _token_column(choice.token_ids)
        untrainable = _untrainable(call, complete=complete and sampled is not None, delivery=delivery)
        sampled = TokenColumn() if sampled is None else sampled
        record = CallRecord(
            call_id=call_id(call.session_id, call.first_seq + index),
            session_id=call.session_id,
            group_id=call.group_id,
            seq=call.first_seq + index,
            thread_id=call.request.thread_id,
            native_ids=dict(call.request.native_ids),
            dialect=call.request.dialect,
            kind=call.request.kind,
            request_digest=call.request.digest,
            choice_index=index,
            open_calls=call.open_calls,
            prompt=history.prompt(prompt or TokenColumn()),
            sampled_ids=sampled,
            logprobs=_fit(choice.logprobs, len(sampled)),
            policy=PolicyInterval(first=call.first_version, last=last_version),
            engine_id=call.engine_id,
            engine_request_id=captured.engine_request_id,
            messages=history.messages(call.request.messages, encoded),
            tools=history.tools(call.request.tools),
            notes=call.request.notes,
            answer=choice.message,
            model_asked=call.request.model,
            sampling_asked=sampling_asked(call.request.fields),
            sampling_used=call.sampling_used,
            finish_reason=choice.finish_reason,
            usage=_usage(captured, choice, alone=call.request.choices == 1),
            stream=call.request.stream,
            delivery=delivery,
            untrainable=untrainable,
            error=error,
        )
        if len(encode(record)) > MAX_RECORD_BYTES:
            records.append(_without_texts(record))
            continue
        history.remember(record, prompt or TokenColumn(), encoded)
        records.append(record)
    return records


def unfinished_record(
    session_id: str, group_id: str, seq: int, *, request_digest: str, choice_index: int, stream: bool,
    sampling_used: dict[str, Any], engine_id: str, version: PolicyVersion, error: str,
) -> CallRecord:  # fmt: skip
    """The record of a number whose call died with its gateway: nothing of it is known but that."""
    return CallRecord(
        call_id=call_id(session_id, seq),
        session_id=session_id,
        group_id=group_id,
        seq=seq,
        request_digest=request_digest,
        choice_index=choice_index,
        prompt=PromptDelta(new_ids=TokenColumn()),
        sampled_ids=TokenColumn(),
        logprobs=FloatColumn(),
        policy=PolicyInterval(first=version, last=version),
        engine_id=engine_id,
        messages=MessagesDelta(digest=digest()),
        tools=ToolsDelta(digest=digest(), tools=()),
        sampling_used=sampling_used,
        stream=stream,
        delivery=Delivery.CLIENT_ABORTED,
        error=error,
    )


def common_prefix(a: bytes, b: bytes) -> int:
    """Leading items that two packed columns share, by bisection over memory compares."""
    low, high = 0, min(len(a), len(b)) // _TOKEN_BYTES
    if a[: high * _TOKEN_BYTES] == b[: high * _TOKEN_BYTES]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low * _TOKEN_BYTES : middle * _TOKEN_BYTES] == b[low * _TOKEN_BYTES : middle * _TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low


def _without_texts(record: CallRecord) -> CallRecord:
    """The record of a call whose texts do not fit a record: its ids stay, and it says so.

    It is no base for later calls, since its messages are gone.
    """
    return record.model_copy(
        update={
            "messages": MessagesDelta(digest=record.messages.digest),
            "tools": ToolsDelta(digest=digest(), tools=()),
            "answer": {},
            "sampling_asked": {},
            "untrainable": record.untrainable or "record_too_large",
            "error": f"texts left out: the record is over {MAX_RECORD_BYTES} bytes. {record.error}".strip(),
        }
    )


def _untrainable(call: Dispatched, *, complete: bool, delivery: Delivery) -> str | None:
    if not call.trainable:
        return "session_not_trainable"
    if call.request.constrained:
        return "constrained_sampling"
    if delivery is Delivery.DELIVERED and not complete:
        return "ids_incomplete"
    return None


def _token_column(ids: Sequence[Any]) -> TokenColumn | None:
    """Packed ids; none when something else than int32 stands among them."""
    try:
        return TokenColumn(ids)
    except (TypeError, OverflowError):
        return None


def _fit(logprobs: Sequence[float], size: int) -> FloatColumn:
    """[size] log-probs: missing ones are NaN, those without an id are cut off."""
    return FloatColumn([*logprobs[:size], *([float("nan")] * (size - len(logprobs)))])


def _usage(captured: Captured, choice: CapturedChoice, *, alone: bool) -> Usage | None:
    """The engine's counts; it adds up choices, so with several a choice's own ids are counted."""
    if captured.usage is None:
        return None
    details = captured.usage.get("prompt_tokens_details")
    return Usage(
        prompt_tokens=_count(captured.usage.get("prompt_tokens")) or 0,
        completion_tokens=(_count(captured.usage.get("completion_tokens")) or 0)
        if alone
        else len(choice.token_ids),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _marks(encoded: Sequence[bytes]) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(message).digest() for message in encoded)


def _common_messages(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    shared = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        shared += 1
    return shared
