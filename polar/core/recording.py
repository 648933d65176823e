"""From a finished call to its CallRecord, delta-encoded against earlier calls of the session.

Invariant: every reserved number gives exactly one record, whatever became of the call, and a
record's bases are calls whose records were built (hence spooled) before it. Deltas save space
only: without a history the same record comes out whole.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson
from msgspec.structs import replace

from polar.core.dialects.base import ModelRequest
from polar.core.dialects.engine_answer import Captured, CapturedChoice
from polar.core.dialects.engine_body import sampling_asked
from polar.core.session_history import Delta, EncodedMessages, EncodedTools, SessionHistory
from polar.core.token_text import TokenText, sound
from schemas.base import canonical_json, digest, encode
from schemas.calls import CallRecord, Continuity, Delivery, MessagesDelta, PromptDelta, ToolsDelta
from schemas.columns import FloatColumn, TokenTextColumn
from schemas.ids import call_id
from schemas.policies import PolicyInterval, PolicyVersion
from schemas.topics import CALLS

MAX_RECORD_BYTES = CALLS.max_message_bytes - 4096
"""The topic's limit counts key and headers too."""
_NO_IDS = TokenText(b"", 0)
_NO_TOOLS = EncodedTools.of(())


class Dispatched(msgspec.Struct, frozen=True):
    """A call as it was sent to the engine."""

    session_id: str
    group_id: str
    first_seq: int
    """seq of choice 0; choice i has first_seq + i."""
    open_calls: tuple[int, ...]
    request: ModelRequest
    messages: EncodedMessages
    """Of the request."""
    tools: EncodedTools
    """Of the request."""
    sampling_used: dict[str, Any]
    trainable: bool
    engine_id: str
    logprobs_mode: str
    """As the record says it: what the engine was seen to give."""
    first_version: PolicyVersion
    continuity: Continuity | None = None
    prompt: TokenText | None = None
    """The prompt's ids, where the gateway made them and the engine has to use them."""


class RecordedCall(msgspec.Struct, frozen=True):
    """A CallRecord's bytes on the log, and what its gateway wants to know of it."""

    seq: int
    choice_index: int
    prompt: TokenText
    """Empty where no ids are known."""
    sampled: TokenText
    ids: TokenText
    """Both."""
    delivery: Delivery
    untrainable: str | None
    finish_reason: str | None
    error: str
    data: bytes
    """Equal to `encode` of the record that it reads as."""


def build_records(
    call: Dispatched,
    captured: Captured,
    history: SessionHistory,
    *,
    last_version: PolicyVersion,
    delivery: Delivery,
    error: str = "",
) -> list[RecordedCall]:
    """One record per choice asked for, in order of seq; `history` learns them."""
    prompt, complete = _prompt(captured), captured.is_complete()
    return [
        _record(
            call, captured, history, index, prompt,
            complete=complete, last_version=last_version, delivery=delivery, error=error,
        )
        for index in range(call.request.choices)
    ]  # fmt: skip


def _record(
    call: Dispatched,
    captured: Captured,
    history: SessionHistory,
    index: int,
    prompt: TokenText | None,
    *,
    complete: bool,
    last_version: PolicyVersion,
    delivery: Delivery,
    error: str,
) -> RecordedCall:
    request = call.request
    choice = captured.choices.get(index) or CapturedChoice()
    ids, sampled = None if prompt is None else history.prompt(prompt), sound(choice.token_ids)
    complete = complete and ids is not None and sampled is not None
    untrainable = _untrainable(call, complete=complete, delivery=delivery)
    if ids is None or prompt is None:
        prompt, ids = _NO_IDS, Delta(None, 0)
    sampled = _NO_IDS if sampled is None else sampled
    messages = history.messages(call.messages)
    knows_tools = history.knows_tools(call.tools)
    seq = call.first_seq + index
    plain: dict[str, Any] = {
        "type": "CallRecord",
        "schema_version": CallRecord.SCHEMA_MAJOR,
        "call_id": call_id(call.session_id, seq),
        "session_id": call.session_id,
        "group_id": call.group_id,
        "seq": seq,
        "thread_id": request.thread_id,
        "native_ids": dict(request.native_ids),
        "dialect": request.dialect,
        "kind": request.kind,
        "request_digest": request.digest,
        "choice_index": index,
        "open_calls": call.open_calls,
        "continuity": call.continuity,
        "media": (),
        "logprobs": _fit(choice.logprobs, len(sampled)).to_text(),
        "logprobs_mode": call.logprobs_mode,
        "policy": {"first": call.first_version, "last": last_version},
        "engine_id": call.engine_id,
        "engine_request_id": captured.engine_request_id,
        "notes": request.notes,
        "model_asked": request.model,
        "finish_reason": choice.finish_reason,
        "usage": _usage(captured, choice, alone=request.choices == 1),
        "stream": request.stream,
        "delivery": delivery.value,
        "untrainable": untrainable,
        "error": error,
    }
    texts = {
        "prompt": b'{"base_call":%b,"kept":%d,"new_ids":"%b"}' % (_seq(ids.base), ids.kept, ids.new.text),
        "sampled_ids": b'"%b"' % sampled.text,
        "answer": canonical_json(choice.message),
        "sampling_asked": canonical_json(sampling_asked(request.fields)),
        "sampling_used": canonical_json(call.sampling_used),
        "messages": b'{"base_call":%b,"digest":"%b","kept":%d,"new":[%b]}' % (
            _seq(messages.base), call.messages.digest.encode(), messages.kept,
            b",".join(call.messages.texts[messages.kept :]),
        ),
        "tools": _tools(call.tools, in_full=not knows_tools),
    }  # fmt: skip
    data = _encode(plain, texts)
    made = RecordedCall(
        seq, index, prompt, sampled, prompt.followed_by(sampled), delivery, untrainable,
        choice.finish_reason, error, data,
    )  # fmt: skip
    if len(data) > MAX_RECORD_BYTES:
        return _without_texts(made, call, plain, texts)
    history.remember(seq, made.ids, call.messages, call.tools)
    return made


def _tools(tools: EncodedTools, *, in_full: bool) -> bytes:
    return b'{"digest":"%b","tools":%b}' % (tools.digest.encode(), tools.text if in_full else b"null")


def _seq(number: int | None) -> bytes:
    return b"null" if number is None else b"%d" % number


def _encode(plain: dict[str, Any], texts: dict[str, bytes]) -> bytes:
    """The record's bytes, of plain fields and of fields that are JSON already."""
    fields = plain | {name: orjson.Fragment(text) for name, text in texts.items()}
    try:
        return orjson.dumps(fields, default=_plain, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # Half a surrogate pair, a number beyond 64 bits: the way that takes everything.
        fields = plain | {name: json.loads(text) for name, text in texts.items()}
        return encode(CallRecord.model_validate(fields))


def _plain(value: Any) -> Any:
    """JSON form of the models that records hold."""
    return value.__dict__


def _prompt(captured: Captured) -> TokenText | None:
    """The prompt's ids as the engine told them; none where they are no list."""
    ids = captured.prompt_ids
    return ids if isinstance(ids, TokenText) else sound(ids)


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
        prompt=PromptDelta(new_ids=TokenTextColumn()),
        sampled_ids=TokenTextColumn(),
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


def recorded(record: CallRecord) -> RecordedCall:
    """A record that was made whole."""
    sampled = TokenText.of(record.sampled_ids.tolist())
    return RecordedCall(
        record.seq, record.choice_index, _NO_IDS, sampled, sampled, record.delivery, record.untrainable,
        record.finish_reason, record.error, encode(record),
    )  # fmt: skip


def _without_texts(
    made: RecordedCall, call: Dispatched, plain: dict[str, Any], texts: dict[str, bytes]
) -> RecordedCall:
    """The record of a call whose texts do not fit a record: its ids stay, and it says so.

    It is no base for later calls, since its messages are gone.
    """
    untrainable = made.untrainable or "record_too_large"
    error = f"texts left out: the record is over {MAX_RECORD_BYTES} bytes. {made.error}".strip()
    no_messages = b'{"base_call":null,"digest":"%b","kept":0,"new":[]}' % call.messages.digest.encode()
    data = _encode(
        plain | {"untrainable": untrainable, "error": error},
        texts
        | {
            "messages": no_messages,
            "tools": _tools(_NO_TOOLS, in_full=True),
            "answer": b"{}",
            "sampling_asked": b"{}",
        },
    )
    return replace(made, untrainable=untrainable, error=error, data=data)


def _untrainable(call: Dispatched, *, complete: bool, delivery: Delivery) -> str | None:
    if not call.trainable:
        return "session_not_trainable"
    if call.request.constrained:
        return "constrained_sampling"
    if delivery is Delivery.DELIVERED and not complete:
        return "ids_incomplete"
    return None


def _fit(logprobs: Sequence[float], size: int) -> FloatColumn:
    """[size] log-probs: missing ones are NaN, those without an id are cut off."""
    if len(logprobs) == size:
        return FloatColumn(logprobs)
    return FloatColumn([*logprobs[:size], *([float("nan")] * (size - len(logprobs)))])


def _usage(captured: Captured, choice: CapturedChoice, *, alone: bool) -> dict[str, int | None] | None:
    """The engine's counts; it adds up choices, so with several a choice's own ids are counted."""
    if captured.usage is None:
        return None
    details = captured.usage.get("prompt_tokens_details")
    sampled = _count(captured.usage.get("completion_tokens")) or 0
    return {
        "prompt_tokens": _count(captured.usage.get("prompt_tokens")) or 0,
        "completion_tokens": sampled if alone else len(choice.token_ids),
        "cached_tokens": _count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    }


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
