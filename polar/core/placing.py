"""A session's records → its calls in one growing tree, each prompt rebuilt from its deltas.

Invariant: a prompt is rebuilt exactly or not at all; a missing base marks the call and those
encoded against it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from polar.core.branches import Place
from polar.core.call_kinds import KindOf
from polar.core.call_usability import Rebuilt, media_parts
from polar.core.drift import HEAD_TOKENS
from polar.core.prefix_tree import (
    HIGHEST_ID,
    PrefixTree,
    Tokens,
    TreePosition,
    as_tokens,
    common_prefix,
    highest_id,
)
from schemas.calls import CallRecord
from schemas.trajectories import UsabilityRules
from schemas.trees import Split, TokenTree


@dataclass(slots=True)
class PlacedCall:
    """A record on its way into the trajectory."""

    record: CallRecord
    kind: KindOf
    is_placed: bool = False
    """False where the prompt could not be rebuilt."""
    prompt_tokens: int = 0
    prompt_place: Place = (-1, 0)
    end_place: Place = (-1, 0)
    """Where prompt and last token end in the tree."""
    head: tuple[int, ...] = ()
    """First ids of prompt and sampled ids, at most HEAD_TOKENS."""
    first_invalid: int | None = None
    """Depth of the first id outside the vocabulary, on the whole path."""
    media_messages: tuple[int, ...] = ()
    """Number of the message of each part that is no text, in the whole history."""
    media: tuple[tuple[int, str | None], ...] = ()
    """(position, digest) of the parts of the whole prompt."""
    reason: str | None = None
    extends: int | None = None
    splits: tuple[Split, ...] = ()

    @property
    def seq(self) -> int:
        return self.record.seq

    def rebuilt(self) -> Rebuilt:
        """What usability is judged by."""
        return Rebuilt(
            kind=self.kind.kind,
            prompt_tokens=self.prompt_tokens,
            invalid_ids=self.first_invalid is not None,
            media_messages=max(len(self.media_messages), len(self.media)),
            media_parts=sum(digest is not None for _, digest in self.media),
        )


class _Ends(NamedTuple):
    """Where a call ends in the growing tree."""

    prompt: TreePosition
    path: TreePosition


def place_calls(
    records: Sequence[CallRecord], kinds: Mapping[int, KindOf], rules: UsabilityRules
) -> tuple[list[PlacedCall], TokenTree]:
    """Insert every call by its delta chain; `records` in order of number."""
    tree = PrefixTree()
    keyframes = _Keyframes(tree)
    by_seq: dict[int, PlacedCall] = {}
    ends: dict[int, _Ends] = {}
    for record in records:
        call = PlacedCall(record, kinds[record.seq])
        base = record.prompt.base_call
        if base is None:
            ends[call.seq] = _place(call, None, tree, keyframes, rules.vocabulary)
        elif base in ends and record.prompt.kept <= ends[base].path.depth:
            above = by_seq[base], ends[base]
            ends[call.seq] = _place(call, above, tree, keyframes, rules.vocabulary)
        call.media_messages = _media_messages(record, by_seq)
        by_seq[call.seq] = call
    exported = tree.export()
    for seq, end in ends.items():
        call = by_seq[seq]
        call.is_placed, call.prompt_tokens = True, end.prompt.depth
        call.prompt_place, call.end_place = exported.locate(end.prompt), exported.locate(end.path)
    return list(by_seq.values()), exported.tree


def _place(
    call: PlacedCall,
    base: tuple[PlacedCall, _Ends] | None,
    tree: PrefixTree,
    keyframes: "_Keyframes",
    vocabulary: int,
) -> _Ends:
    record, kept = call.record, call.record.prompt.kept
    new_ids, sampled = as_tokens(record.prompt.new_ids), as_tokens(record.sampled_ids)
    known = [(part.position - kept, part.digest) for part in record.media if part.digest is not None]
    highest = highest_id(record.prompt.new_ids, record.sampled_ids)
    has_negative = highest > HIGHEST_ID
    new_keys = tree.keys(new_ids, known, has_negative=has_negative)
    sampled_keys = tree.keys(sampled, has_negative=has_negative)
    if base is None:
        prompt = keyframes.insert(new_keys)
    else:
        above, end = base
        prompt = tree.insert(new_keys, tree.ancestor(end.path, kept))
        call.media = tuple(part for part in above.media if part[0] < kept) if above.media else ()
        call.head = above.head if kept >= HEAD_TOKENS else above.head[:kept]
        if above.first_invalid is not None and above.first_invalid < kept:
            call.first_invalid = above.first_invalid
    if record.media:
        call.media += tuple((part.position, part.digest) for part in record.media)
    if len(call.head) < HEAD_TOKENS:
        head = (*call.head, *new_ids[:HEAD_TOKENS].tolist(), *sampled[:HEAD_TOKENS].tolist())
        call.head = head[:HEAD_TOKENS]
    if highest >= vocabulary and call.first_invalid is None:
        ids = np.concatenate([new_ids, sampled]).view(np.uint32)
        call.first_invalid = kept + int((ids >= vocabulary).argmax())
    return _Ends(prompt, tree.insert(sampled_keys, prompt))


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


def _media_messages(record: CallRecord, by_seq: Mapping[int, PlacedCall]) -> tuple[int, ...]:
    delta = record.messages
    base = by_seq.get(delta.base_call) if delta.base_call is not None else None
    held = base.media_messages if base is not None else ()
    inherited = tuple(at for at in held if at < delta.kept) if held else ()
    own = [delta.kept + at for at, message in enumerate(delta.new) for _ in range(media_parts(message))]
    return (*inherited, *own) if own else inherited
