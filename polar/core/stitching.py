"""One session's records → its Trajectory: the token-prefix tree with every call in it.

Invariants: a pure function of the set of records (whatever their order or duplicates); every
announced call is in `calls` or `listed`; a prompt is rebuilt exactly or not at all.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polar.core.call_usability import (
    Attempt,
    UsabilityRules,
    bad_logprobs,
    has_media,
    orphan_retries,
    own_reason,
)
from polar.core.drift import HEAD_TOKENS, CallView, classify
from polar.core.prefix_tree import PrefixTree, Tokens, TreePaths, TreePosition, as_tokens, common_prefix
from schemas.calls import CallRecord, Delivery, SessionAbandoned, SessionOpened, SessionSealed
from schemas.columns import FloatColumn, TokenColumn
from schemas.ids import call_id, trajectory_id
from schemas.sessions import Outcome
from schemas.trajectories import CallText, Trajectory
from schemas.trees import ListedItem, Split, StitchedCall

ALGORITHM = "stitch-1"

_MAX_MISSING_LISTED = 10_000
"""Missing calls listed one by one; a broken seal must not fill the memory."""

_Place = tuple[int, int]
"""(run, offset) in the exported tree."""


class SessionLog:
    """The records of one open session; duplicates by call number are dropped, the first wins."""

    def __init__(self, opened: SessionOpened) -> None:
        self.opened = opened
        self.records: dict[int, CallRecord] = {}

    def add(self, record: CallRecord) -> bool:
        """Take a record; False when its number is there already."""
        if record.seq in self.records:
            return False
        self.records[record.seq] = record
        return True

    def close(
        self, closing: SessionSealed | SessionAbandoned, rules: UsabilityRules | None = None
    ) -> Trajectory:
        """The trajectory of the session as it stands at its closing record."""
        return stitch(self.opened, self.records.values(), closing, rules)


def stitch(
    opened: SessionOpened,
    records: Iterable[CallRecord],
    closing: SessionSealed | SessionAbandoned,
    rules: UsabilityRules | None = None,
) -> Trajectory:
    """Build the trajectory of a session from its records (numbers must differ)."""
    calls = [_Call(record) for record in sorted(records, key=lambda record: record.seq)]
    tree = PrefixTree()
    _rebuild_prompts(calls, tree)
    exported = tree.export()
    for call in calls:
        if call.prompt_end is not None and call.end is not None:
            call.prompt_place = exported.locate(call.prompt_end)
            call.end_place = exported.locate(call.end)
    paths = TreePaths(exported.tree)
    _judge(calls, paths, rules or UsabilityRules(), session_trainable=opened.trainable)
    _relate(calls, paths)
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
        tree=exported.tree,
        calls=tuple(_stitched(call, opened) for call in calls),
        texts=tuple(_text(call.record) for call in calls),
        tools=_tools(calls),
        listed=_listed(opened.session_id, calls, sealed),
        algorithm=ALGORITHM,
    )


@dataclass(slots=True)
class _Call:
    """A record on its way into the tree."""

    record: CallRecord
    prompt_end: TreePosition | None = None
    end: TreePosition | None = None
    """Both None where the prompt could not be rebuilt."""
    prompt_place: _Place = (-1, 0)
    end_place: _Place = (-1, 0)
    first_media: int | None = None
    """Index of the first message with a part that is no text."""
    reason: str | None = None
    extends: int | None = None
    splits: tuple[Split, ...] = ()

    @property
    def seq(self) -> int:
        return self.record.seq

    @property
    def prompt_tokens(self) -> int:
        return self.prompt_end.depth if self.prompt_end is not None else 0


def _rebuild_prompts(calls: Iterable[_Call], tree: PrefixTree) -> None:
    """Place every call in the tree by its delta chain, in order of number."""
    by_seq: dict[int, _Call] = {}
    keyframes = _Keyframes(tree)
    for call in calls:
        delta = call.record.prompt
        new_ids = as_tokens(delta.new_ids)
        if delta.base_call is None:
            call.prompt_end = keyframes.insert(new_ids)
        else:
            base = by_seq.get(delta.base_call)
            if base is not None and base.end is not None and delta.kept <= base.end.depth:
                call.prompt_end = tree.insert(new_ids, tree.ancestor(base.end, delta.kept))
        if call.prompt_end is not None:
            call.end = tree.insert(as_tokens(call.record.sampled_ids), call.prompt_end)
        call.first_media = _first_media(call.record, by_seq)
        by_seq[call.seq] = call


class _Keyframes:
    """Inserts whole prompts. Each starts where it parts from the one before: comparing two arrays is
    far cheaper than walking a path of many short runs."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._last, self._end = as_tokens([]), tree.root

    def insert(self, prompt: Tokens) -> TreePosition:
        shared = common_prefix(prompt, self._last)
        start = self._tree.ancestor(self._end, shared)
        self._last, self._end = prompt, self._tree.insert(prompt[shared:], start)
        return self._end


def _first_media(record: CallRecord, by_seq: Mapping[int, _Call]) -> int | None:
    delta = record.messages
    base = by_seq.get(delta.base_call) if delta.base_call is not None else None
    if base is not None and base.first_media is not None and base.first_media < delta.kept:
        return base.first_media
    return next((delta.kept + i for i, message in enumerate(delta.new) if has_media(message)), None)


def _judge(calls: list[_Call], paths: TreePaths, rules: UsabilityRules, *, session_trainable: bool) -> None:
    """Set `reason` of every call that must not be trained."""
    attempts = []
    for call in calls:
        if call.end is None:
            call.reason = "missing_base"
            continue
        call.reason = own_reason(
            call.record,
            rules,
            prompt_tokens=call.prompt_tokens,
            has_media=call.first_media is not None,
            session_trainable=session_trainable,
        )
        record = call.record
        same_as = (record.thread_id, record.request_digest, call.prompt_place, record.choice_index)
        attempts.append(
            Attempt(
                call.seq,
                same_as,
                frozenset(record.open_calls),
                delivered=record.delivery is Delivery.DELIVERED,
                usable=call.reason is None,
            )
        )
    by_seq = {call.seq: call for call in calls if call.end is not None}

    def is_continued(seq: int, logical: set[int]) -> bool:
        end = by_seq[seq].end_place
        return any(
            other.seq not in logical and paths.is_prefix(end, other.prompt_place) for other in by_seq.values()
        )

    for seq in orphan_retries(attempts, is_continued):
        by_seq[seq].reason = "orphan_retry"


def _relate(calls: list[_Call], paths: TreePaths) -> None:
    """Set `extends` and `splits` of the usable calls, in order of number."""
    views = _Views(calls, paths)
    seen = _SeenPaths(paths)
    for call in calls:
        if call.reason is not None:
            continue
        call.extends, extended = seen.longest_extended(call.prompt_place)
        against, index = seen.longest_common(call.prompt_place)
        if against is not None and (call.extends is None or extended < index):
            cause, detail = classify(
                views.of(call.seq),
                views.of(against),
                index,
                compacted_between=views.compacted(against, call.seq, call.record.thread_id),
            )
            call.splits = (Split(against=against, index=index, cause=cause, detail=detail),)
        seen.add(call.seq, call.end_place)


class _SeenPaths:
    """Which usable calls passed through, or ended in, each run of the tree."""

    def __init__(self, paths: TreePaths) -> None:
        self._paths = paths
        self._ends: dict[int, list[tuple[int, int]]] = {}
        """Run → (offset, seq) of the calls that end in it."""
        self._passing: dict[int, int] = {}
        """Run → latest seq of the calls that go on below it."""
        self._latest: int | None = None

    def add(self, seq: int, end: _Place) -> None:
        run, offset = end
        self._latest = seq
        self._ends.setdefault(run, []).append((offset, seq))
        run = self._paths.parents[run]
        while run >= 0:
            self._passing[run] = seq
            run = self._paths.parents[run]

    def longest_extended(self, prompt: _Place) -> tuple[int | None, int]:
        """(seq, depth) of the call whose whole path is the longest prefix of a prompt."""
        run, extent = prompt
        while run >= 0:
            ends = [(offset, seq) for offset, seq in self._ends.get(run, ()) if offset <= extent]
            if ends:
                offset, seq = max(ends)
                return seq, self._paths.depths[run] + offset
            run, extent = self._above(run)
        return None, 0

    def longest_common(self, prompt: _Place) -> tuple[int | None, int]:
        """(seq, length) of the call with the longest common prefix; ties: the latest."""
        run, extent = prompt
        while run >= 0:
            shared = [(min(offset, extent), seq) for offset, seq in self._ends.get(run, ())]
            if run in self._passing:
                shared.append((extent, self._passing[run]))
            if shared:
                common, seq = max(shared)
                return seq, self._paths.depths[run] + common
            run, extent = self._above(run)
        return self._latest, 0

    def _above(self, run: int) -> _Place:
        parent = self._paths.parents[run]
        return parent, self._paths.length(parent) if parent >= 0 else 0


class _Views:
    """What drift compares of each call, read only for calls that split."""

    def __init__(self, calls: list[_Call], paths: TreePaths) -> None:
        self._by_seq = {call.seq: call for call in calls}
        self._compactions = [c for c in calls if c.record.kind == "compaction"]
        self._paths = paths

    def compacted(self, first: int, last: int, thread_id: str) -> bool:
        """Whether a summary call of the thread has a number in [first, last)."""
        return any(
            first <= call.seq < last and call.record.thread_id == thread_id for call in self._compactions
        )

    def of(self, seq: int) -> CallView:
        call = self._by_seq[seq]
        return CallView(
            prompt_tokens=call.prompt_tokens,
            head=self._paths.head(*call.end_place, HEAD_TOKENS),
            messages=self._messages(seq),
            answer=call.record.answer,
            tools_digest=call.record.tools.digest,
            thread_id=call.record.thread_id,
            kind=call.record.kind,
        )

    def _messages(self, seq: int) -> list[dict[str, Any]] | None:
        """Whole message history of a call; None where a base is missing or nothing was recorded."""
        chain: list[tuple[int, tuple[dict[str, Any], ...]]] = []
        number: int | None = seq
        while number is not None:
            call = self._by_seq.get(number)
            if call is None or (chain and number >= seq):
                return None
            delta, seq = call.record.messages, number
            chain.append((delta.kept, delta.new))
            number = delta.base_call
        messages: list[dict[str, Any]] = []
        for kept, new in reversed(chain):
            if kept > len(messages):
                return None
            messages = [*messages[:kept], *new]
        return messages or None


def _stitched(call: _Call, opened: SessionOpened) -> StitchedCall:
    record = call.record
    placed = call.end is not None
    logprobs = record.logprobs.tolist() if placed else []
    masked = bad_logprobs(logprobs)
    for index in masked:
        logprobs[index] = float("nan")
    temperature = record.sampling_used.get("temperature")
    return StitchedCall(
        call_id=record.call_id,
        session_id=record.session_id,
        seq=record.seq,
        thread_id=record.thread_id,
        kind=record.kind,
        end_run=call.end_place[0],
        end_offset=call.end_place[1],
        prompt_tokens=call.prompt_tokens,
        sampled_tokens=len(logprobs),
        logprobs=FloatColumn(logprobs),
        temperature=float(temperature)
        if isinstance(temperature, (int, float))
        else opened.sampling.temperature,
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


def _tools(calls: Iterable[_Call]) -> dict[str, tuple[dict[str, Any], ...]]:
    return {call.record.tools.digest: call.record.tools.tools for call in calls if call.record.tools.tools}


def _listed(session_id: str, calls: list[_Call], sealed: SessionSealed | None) -> tuple[ListedItem, ...]:
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
