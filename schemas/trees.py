"""The token-prefix tree as columns, and the calls that lie in it."""

import itertools
from typing import Literal, Self

from pydantic import model_validator

from schemas.base import WireModel
from schemas.columns import FloatColumn, TokenColumn
from schemas.policies import PolicyInterval

Cause = Literal[
    "retokenized", "thinking_stripped", "arguments_reserialized", "assistant_rewritten",
    "tool_result_reordered", "tools_changed", "system_changed", "compaction", "subagent",
    "retry", "bos", "truncated_history", "unknown",
]  # fmt: skip


class TreeMedia(WireModel):
    """A token of a tree that stands for a picture, a sound or another part that is no text."""

    index: int
    """Index into the tree's `tokens` of the part's first token."""
    digest: str
    """As in schemas.calls.MediaPart."""


class TokenTree(WireModel):
    """A compressed trie of token ids (radix tree).

    Runs are numbered depth first, children by their first token and its digest, so the numbering
    is a pure function of the set of sequences inserted. A run's tokens are
    `tokens[starts[r]:starts[r + 1]]`; siblings start with different tokens, or with equal ones that
    stand for different media.
    """

    parents: TokenColumn
    """[runs] index of the parent run, -1 for a root. A parent has a smaller index."""
    starts: TokenColumn
    """[runs + 1] offsets into `tokens`."""
    tokens: TokenColumn
    """[tokens] ids; len(tokens) is the number of distinct (prefix, token) pairs."""
    media: tuple[TreeMedia, ...] = ()
    """Tokens with something else than text behind them, by index."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        starts = self.starts.tolist()
        if len(starts) != len(self.parents) + 1 or starts[0] != 0 or starts[-1] != len(self.tokens):
            raise ValueError("tree: starts must be [runs + 1] offsets from 0 to len(tokens)")
        if any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError("tree: a run is empty")
        if any(parent >= run or parent < -1 for run, parent in enumerate(self.parents)):
            raise ValueError("tree: a parent must come before its child")
        if any(not 0 <= each.index < len(self.tokens) for each in self.media):
            raise ValueError("tree: media must stand on one of its tokens")
        return self


class Split(WireModel):
    """A place where a call's prompt does not extend what an earlier call held."""

    against: int
    """seq of the usable earlier call with the longest common prefix."""
    index: int
    """Length of that common prefix in tokens."""
    cause: Cause
    detail: str = ""
    message: int | None = None
    """Index, in the call's request, of the message in which the split falls; none where no text tells."""
    held_text: str = ""
    """What the earlier call held from `index` on, decoded; empty where the stitcher has no tokenizer."""
    found_text: str = ""
    """What the prompt holds there instead."""


class StitchedCall(WireModel):
    """One call in the tree of its session (or group)."""

    call_id: str
    session_id: str
    seq: int
    thread_id: str = ""
    kind: str = "agent"
    kind_rule: str = "default"
    """Which rule decided the kind (polar.core.call_kinds): `recorded`, `default`, …"""
    end_run: int
    """Run in which the call's last token lies; -1 when prompt and completion are empty."""
    end_offset: int
    """Tokens of that run that belong to the call (1 .. run length; 0 with end_run -1)."""
    prompt_tokens: int
    """Depth at which sampling began: tokens [0, prompt_tokens) are context."""
    sampled_tokens: int
    """Depths [prompt_tokens, prompt_tokens + sampled_tokens) were sampled by this call."""
    logprobs: FloatColumn
    """[sampled_tokens] engine log-probs; NaN where masked (`bad_logprob`)."""
    temperature: float
    policy: PolicyInterval
    finish_reason: str | None = None
    untrainable: str | None = None
    """Reason why no token of it is trained; none for a usable call."""
    masked: TokenColumn = TokenColumn()
    """Indexes into the completion that are not trained (bad log-prob)."""
    extends: int | None = None
    """seq of the usable earlier call whose prompt + completion this prompt continues."""
    splits: tuple[Split, ...] = ()

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if len(self.logprobs) != self.sampled_tokens:
            raise ValueError("logprobs and sampled_tokens differ")
        return self


class ListedItem(WireModel):
    """Something that was received and is not trained, with the reason: nothing vanishes."""

    id: str
    """call_id, trajectory_id, reward_id or session_id."""
    reason: str
    detail: str = ""
