"""From a finished call to its CallRecord, delta-encoded against earlier calls of the session.

Invariant: every reserved number gives exactly one record, whatever became of the call, and a
record's bases are calls whose records were built (hence spooled) before it. Deltas save space
only: without a history the same record comes out whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from polar.core.dialects.base import ModelRequest
from polar.core.dialects.engine_answer import Captured, CapturedChoice
from polar.core.dialects.engine_body import sampling_asked
from polar.core.session_history import EncodedMessages, EncodedTools, SessionHistory
from polar.core.token_text import TokenText
from schemas.base import canonical_json, digest, encode
from schemas.calls import CallRecord, Continuity, Delivery, MessagesDelta, PromptDelta, ToolsDelta, Usage
from schemas.columns import FloatColumn, TokenColumn
from schemas.ids import call_id
from schemas.policies import PolicyInterval, PolicyVersion
from schemas.topics import CALLS

MAX_RECORD_BYTES = CALLS.max_message_bytes - 4096
"""The topic's limit counts key and headers too."""
_COLUMNS = (TokenColumn, FloatColumn)


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
    continuity: Continuity | None = None
    prompt: TokenColumn | None = None
    """The prompt's ids, where the gateway made them and the engine has to use them."""
    prompt_text: TokenText | None = None
    """The same, as the engine gets them and has to give them back."""


@dataclass(frozen=True, slots=True)
class EncodedCall:
    """A record and its bytes on the log."""

    record: CallRecord
    data: bytes
    """Equal to `encode(record)`."""

    @classmethod
    def of(cls, record: CallRecord) -> "EncodedCall":
        """Encode a record."""
        return cls(record, encode(record))


def build_records(
    call: Dispatched,
    captured: Captured,
    history: SessionHistory,
    *,
    last_version: PolicyVersion,
    delivery: Delivery,
    error: str = "",
) -> list[EncodedCall]:
    """One record per choice asked for, in order of seq; `history` learns them."""
    messages, tools = EncodedMessages.of(call.request.messages), EncodedTools.of(call.request.tools)
    prompt = prompt_column(call, captured, history)
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
            continuity=call.continuity,
            prompt=history.prompt(prompt or TokenColumn()),
            sampled_ids=sampled,
            logprobs=_fit(choice.logprobs, len(sampled)),
            policy=PolicyInterval(first=call.first_version, last=last_version),
            engine_id=call.engine_id,
            engine_request_id=captured.engine_request_id,
            messages=history.messages(messages),
            tools=history.tools(tools),
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
        data = _encode(record, messages, tools)
        if len(data) > MAX_RECORD_BYTES:
            records.append(EncodedCall.of(_without_texts(record)))
            continue
        text = _text_of(captured, choice, sampled)
        history.remember(record.seq, prompt or TokenColumn(), sampled, text, messages, record.tools)
        records.append(EncodedCall(record, data))
    return records


def _encode(record: CallRecord, messages: EncodedMessages, tools: EncodedTools) -> bytes:
    """The record's bytes, put together from the messages' own: `encode(record)`, for a part of its cost."""
    new = [orjson.Fragment(text) for text in messages.texts[record.messages.kept :]]
    foreign = {
        name: orjson.Fragment(canonical_json(getattr(record, name)))
        for name in ("answer", "sampling_asked", "sampling_used")
    }
    is_new = record.tools.tools is not None
    fields = {
        **record.__dict__,
        **foreign,
        "messages": {**record.messages.__dict__, "new": new},
        "tools": {
            **record.tools.__dict__,
            "tools": [orjson.Fragment(text) for text in tools.texts] if is_new else None,
        },
    }
    try:
        return orjson.dumps(fields, default=_plain, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # Half a surrogate pair, a number beyond 64 bits: the way that takes everything.
        return encode(record)


def _plain(value: Any) -> Any:
    """JSON form of what records hold beside plain data."""
    if type(value) in _COLUMNS:
        return value.to_text()
    return value.__dict__


def prompt_column(call: Dispatched, captured: Captured, history: SessionHistory) -> TokenColumn | None:
    """The prompt's ids as one column; None where the engine's are none."""
    if call.prompt is not None and captured.prompt_is_as_sent:
        return call.prompt
    if not isinstance(captured.prompt_ids, TokenText):
        return _token_column(captured.prompt_ids)
    try:
        return history.pack(captured.prompt_ids)
    except (OverflowError, ValueError):
        return None


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


def _text_of(captured: Captured, choice: CapturedChoice, sampled: TokenColumn) -> bytes:
    """Prompt and sampled ids as they stand at the beginning of a prompt that continues them."""
    if not isinstance(captured.prompt_ids, TokenText) or len(sampled) != len(choice.token_ids):
        return b""
    return TokenText.of(choice.token_ids, behind=captured.prompt_ids.text).text


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
