"""One session's records → its Trajectory: the token-prefix tree with every call in it.

Invariants: a pure function of the set of records (whatever their order or duplicates); every
announced call is in `calls` or `listed`; a prompt is rebuilt exactly or not at all.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from polar.core.branches import PlacedPath, PlaceOrder, Relation, relate
from polar.core.call_kinds import decide_kinds
from polar.core.call_usability import (
    Attempt,
    bad_logprobs,
    orphan_retries,
    own_reason,
    temperature_of,
)
from polar.core.drift import (
    SHOWN_TOKENS,
    Anchor,
    CallView,
    Decode,
    Parting,
    diagnose,
)
from polar.core.histories import Histories
from polar.core.placing import PlacedCall, place_calls
from polar.core.prefix_tree import TreePaths
from schemas.calls import CallRecord, Delivery, SessionAbandoned, SessionOpened, SessionSealed
from schemas.columns import FloatColumn, TokenColumn
from schemas.ids import call_id, trajectory_id
from schemas.sessions import Outcome
from schemas.trajectories import CallText, Trajectory, UsabilityRules
from schemas.trees import ListedItem, Split, StitchedCall

ALGORITHM = "stitch-2"

_MAX_MISSING_LISTED = 10_000
"""Missing calls listed one by one; a broken seal must not fill the memory."""
_MAX_ANCHORS = 1_000
"""Requests that are walked up to find the message of a split."""


def stitch(
    opened: SessionOpened,
    records: Iterable[CallRecord],
    closing: SessionSealed | SessionAbandoned,
    rules: UsabilityRules | None = None,
    decode: Decode | None = None,
) -> Trajectory:
    """Build the trajectory of a session from its records (numbers must differ).

    `decode`: gives splits their texts; without it they have none.
    """
    rules = rules or UsabilityRules()
    ordered = sorted(records, key=lambda record: record.seq)
    calls, tree = place_calls(ordered, decide_kinds(ordered), rules)
    paths = TreePaths(tree)
    _judge(calls, paths, rules, session_trainable=opened.trainable)
    _relate(calls, paths, decode)
    sealed = closing if isinstance(closing, SessionSealed) else None
    return Trajectory(
        trajectory_id=trajectory_id(opened.session_id),
        session_id=opened.session_id,
        group_id=opened.group_id,
        closed_by="sealed" if sealed else "abandoned",
        outcome=sealed.outcome if sealed else Outcome.INFRA_ERROR,
        reason=closing.reason,
        declared_calls=sealed.calls if sealed else None,
        sampling=opened.sampling,
        tree=tree,
        calls=tuple(_stitched(call, opened) for call in calls),
        texts=tuple(_text(call.record) for call in calls),
        tools=_tools(calls),
        listed=_listed(opened.session_id, calls, sealed),
        rules=rules,
        algorithm=ALGORITHM,
    )


def _judge(
    calls: Sequence[PlacedCall], paths: TreePaths, rules: UsabilityRules, *, session_trainable: bool
) -> None:
    """Set `reason` of every call that must not be trained."""
    attempts = []
    for call in calls:
        if not call.is_placed:
            call.reason = "missing_base"
            continue
        record = call.record
        call.reason = own_reason(record, rules, call.rebuilt(), session_trainable=session_trainable)
        attempts.append(
            Attempt(
                call.seq,
                (record.thread_id, record.request_digest, call.prompt_place, record.choice_index),
                record.open_calls,
                delivered=record.delivery is Delivery.DELIVERED,
                usable=call.reason is None,
            )
        )
    placed = {call.seq: call for call in calls if call.is_placed}
    prompts: list[PlaceOrder] = []

    def is_continued(seq: int) -> bool:
        """Whether a prompt lies below the call's end; those of its own request lie above it."""
        if not prompts:
            prompts.append(PlaceOrder([call.prompt_place for call in placed.values()], paths))
        first, last = prompts[0].below(placed[seq].end_place)
        return first < last

    for seq in orphan_retries(attempts, is_continued):
        placed[seq].reason = "orphan_retry"


def _relate(calls: Sequence[PlacedCall], paths: TreePaths, decode: Decode | None) -> None:
    """Set `extends` and `splits` of the usable calls."""
    usable = [call for call in calls if call.reason is None]
    relations = relate([PlacedPath(call.seq, call.prompt_place, call.end_place) for call in usable], paths)
    causes = _Causes(calls, dict(zip((call.seq for call in usable), relations, strict=True)), paths, decode)
    for call, relation in zip(usable, relations, strict=True):
        call.extends = relation.extends
        if relation.against is not None:
            call.splits = (causes.split(call, relation.against, relation.index),)


class _Causes:
    """Gathers what drift compares, only for calls that split."""

    def __init__(
        self,
        calls: Sequence[PlacedCall],
        relations: dict[int, Relation],
        paths: TreePaths,
        decode: Decode | None,
    ) -> None:
        self._by_seq = {call.seq: call for call in calls}
        self._relations = relations
        self._paths = paths
        self._decode = decode
        self._histories = Histories({call.seq: call.record for call in calls})
        self._compactions: dict[str, list[int]] = {}
        """Thread → numbers of its summary calls, ascending."""
        for call in calls:
            if call.kind.kind == "compaction":
                self._compactions.setdefault(call.record.thread_id, []).append(call.seq)

    def split(self, call: PlacedCall, against: int, index: int) -> Split:
        """The split of a call from an earlier one, with its cause and both sides' texts."""
        earlier = self._by_seq[against]
        parting = Parting(
            call=self._view(call),
            against=self._view(earlier),
            index=index,
            found=lambda size: self._paths.stretch(call.prompt_place, index, index + size),
            held=lambda size: self._paths.stretch(earlier.end_place, index, index + size),
            anchor=self._anchor(against, index),
            shared_messages=self._histories.shared(call.seq, against),
            compacted_between=self._is_compacted(against, call.seq, call.record.thread_id),
        )
        diagnosis = diagnose(parting, self._histories, self._decode)
        held, found = "", ""
        if self._decode is not None:
            held = self._decode(parting.held(SHOWN_TOKENS).tolist())
            found = self._decode(parting.found(SHOWN_TOKENS).tolist())
        return Split(
            against=against,
            index=index,
            cause=diagnosis.cause,
            detail=diagnosis.detail,
            message=diagnosis.message,
            held_text=held,
            found_text=found,
        )

    def _view(self, call: PlacedCall) -> CallView:
        return CallView(
            prompt_tokens=call.prompt_tokens,
            head=call.head,
            messages=self._histories.of(call.seq),
            answer=call.record.answer,
            tools_digest=call.record.tools.digest,
            thread_id=call.record.thread_id,
            kind=call.kind.kind,
        )

    def _anchor(self, seq: int, index: int) -> Anchor | None:
        """The longest request on the path of a call whose prompt ends at or before `index`."""
        number: int | None = seq
        for _ in range(_MAX_ANCHORS):
            if number is None:
                return None
            call = self._by_seq[number]
            if call.prompt_tokens <= index:
                messages = self._histories.count(number)
                return Anchor(call.prompt_tokens, len(call.record.sampled_ids), messages)
            number = self._relations[number].extends
        return None

    def _is_compacted(self, first: int, last: int, thread_id: str) -> bool:
        """Whether a summary call of the thread has a number in [first, last)."""
        seqs = self._compactions.get(thread_id, [])
        return bisect_left(seqs, first) < bisect_left(seqs, last)


def _stitched(call: PlacedCall, opened: SessionOpened) -> StitchedCall:
    record = call.record
    logprobs = record.logprobs if call.is_placed else FloatColumn()
    masked = bad_logprobs(logprobs)
    if masked:
        values = np.frombuffer(logprobs.data, dtype="<f4").copy()
        values[masked] = np.nan
        logprobs = FloatColumn.from_bytes(values.tobytes())
    temperature = temperature_of(record, default=opened.sampling.temperature)
    return StitchedCall(
        call_id=record.call_id,
        session_id=record.session_id,
        seq=record.seq,
        thread_id=record.thread_id,
        kind=call.kind.kind,
        kind_rule=call.kind.rule,
        end_run=call.end_place[0],
        end_offset=call.end_place[1],
        prompt_tokens=call.prompt_tokens,
        sampled_tokens=len(logprobs),
        logprobs=logprobs,
        temperature=temperature if math.isfinite(temperature) else opened.sampling.temperature,
        policy=record.policy,
        finish_reason=record.finish_reason,
        untrainable=call.reason,
        masked=TokenColumn(masked),
        extends=call.extends,
        splits=call.splits,
    )


def _text(record: CallRecord) -> CallText:
    return CallText(
        call_id=record.call_id,
        new_messages=record.messages.new,
        kept_messages=record.messages.kept,
        base_call=record.messages.base_call,
        answer=record.answer,
        tools_digest=record.tools.digest,
    )


def _tools(calls: Iterable[PlacedCall]) -> dict[str, tuple[dict[str, Any], ...]]:
    return {call.record.tools.digest: call.record.tools.tools for call in calls if call.record.tools.tools}


def _listed(
    session_id: str, calls: Sequence[PlacedCall], sealed: SessionSealed | None
) -> tuple[ListedItem, ...]:
    """Announced calls that are not there, and calls beyond the announced number."""
    seqs = {call.seq for call in calls}
    highest = max(seqs, default=0)
    announced = sealed.calls if sealed else highest
    missing = (seq for seq in range(1, announced + 1) if seq not in seqs)
    items = [
        ListedItem(id=call_id(session_id, seq), reason="missing_call")
        for seq in itertools.islice(missing, _MAX_MISSING_LISTED)
    ]
    unlisted = announced - sum(seq <= announced for seq in seqs) - len(items)
    if unlisted > 0:
        items.append(ListedItem(id=session_id, reason="missing_call", detail=f"and {unlisted} more"))
    items += [
        ListedItem(id=call_id(session_id, seq), reason="unannounced_call")
        for seq in sorted(seqs)
        if seq > announced
    ]
    return tuple(items)
