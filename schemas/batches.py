"""polar.batches.v1: a BatchManifest, then its PackedRows."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.base import Event, WireModel
from schemas.columns import FloatColumn, TokenColumn
from schemas.policies import PolicyVersion
from schemas.trees import ListedItem

Builder = Literal["per_request", "prefix_merging", "prefix_tree"]
"""How a batch becomes rows: a causal sequence a call, one a leaf of the tree, or the tree itself.
The gradients are equal."""


class SourceGroup(WireModel):
    """Where a group of the batch came from."""

    group_id: str
    seal_partition: int
    seal_offset: int
    """Coordinates of its GroupSealed in polar.group-events.v1."""


class BatchManifest(Event):
    """The decision which groups make a batch; rows follow from it alone."""

    type: Literal["BatchManifest"] = "BatchManifest"
    policy: str
    number: Annotated[int, Field(ge=0)]
    groups: tuple[str, ...]
    """Group ids in order, live or not."""
    live_groups: tuple[str, ...]
    excluded: tuple[ListedItem, ...] = ()
    """Groups taken off the stream without training (`stale`, …), with reasons."""
    truncated: tuple[ListedItem, ...] = ()
    """Calls of which tokens lie beyond the row budget and are not trained (`row_truncated`)."""
    policy_version: PolicyVersion | None
    """Newest published version that staleness was measured against."""
    builder: Builder
    row_tokens: int
    """Token budget of a row."""
    row_count: Annotated[int, Field(ge=0)]
    rows_digest: str
    """`schemas.base.digest` over the encodings of the rows in order."""
    row_lengths: TokenColumn
    """[row_count] tokens of each row."""
    row_pairs: tuple[int, ...]
    """[row_count] pairs of a token and a token that it attends to, itself included. Lengths and pairs
    make the work of a row; `polar.core.rank_shares` deals rows out by it."""
    live_rollouts: Annotated[int, Field(ge=0)]
    """Denominator of the loss: each of these has the share 1 / live_rollouts."""
    trained_tokens: Annotated[int, Field(ge=0)]
    """Occurrences over all rows."""
    mean_reward: float | None = None
    """Mean score of the scored members of `groups`."""
    metrics: dict[str, float | dict[str, float]] = {}
    """unique_tokens: distinct (prefix, token) pairs on trained paths, summed over the groups; of them
    common_tokens are in several groups; naive_tokens: the same call by call; computed_tokens: tokens
    of the rows; repeated_ancestor_tokens: those that are in a row again, computed_tokens -
    (unique_tokens - common_tokens); row_fill: computed_tokens / (row_count * row_tokens);
    faithful_share: tokens trained exactly once under exactly their call's prefix, over those that
    should be; sampled_share_by_kind, calls_by_cause, …"""
    algorithm: str


class PackedRow(Event):
    """One row for the trainer: branches of prefix trees side by side, none seeing another.

    Let t be the row's tokens, s its segments, r its ancestor ranges and n its trained occurrences.
    A segment is a stretch of neighbouring tokens in one branch. Its token at offset i attends to
    the ancestor ranges of the segment, all of them, and to the segment's tokens up to i. A segment without
    ancestors is a causal sequence of its own: `per_request` and `prefix_merging` make no others, and
    for them `segment_starts` is what attention kernels call cu_seqlens.
    """

    type: Literal["PackedRow"] = "PackedRow"
    policy: str
    batch_number: int
    index: int
    """0 .. row_count - 1; rows with more work come first."""
    tokens: TokenColumn
    """[t] token ids."""
    positions: TokenColumn
    """[t] depth of each token: the number of tokens before it in its branch, from 0."""
    segment_starts: TokenColumn
    """[s + 1] row offsets of the segments; from 0 to t, ascending."""
    range_counts: TokenColumn
    """[s] ancestor ranges of each segment."""
    range_starts: TokenColumn
    """[r] row offset of the first token of each ancestor range: the ranges of the first segment from the
    root of its tree down, then those of the second, …"""
    range_ends: TokenColumn
    """[r] row offset behind the last token of each. The lengths of a segment's ranges sum up to
    the position of its first token, and all its ranges lie before it."""
    sources: TokenColumn
    """[n] row offset at which the target is predicted: that of the token before it, ascending. A
    branch's first token is predicted in the segment that it leaves, and any number of calls may
    have sampled after one token: an offset can be there many times, with equal targets or others."""
    targets: TokenColumn
    """[n] token id that was sampled there."""
    engine_logprobs: FloatColumn
    """[n] log-prob that the engine gave."""
    temperatures: FloatColumn
    """[n] temperature that the token was sampled at."""
    weights: FloatColumn
    """[n] share of the token in the loss: 1 / live_rollouts / trained tokens of its rollout."""
    advantages: FloatColumn
    """[n] advantage of its rollout, plus the credit of its call."""
    call_ordinals: TokenColumn
    """[n] index into `call_ids`."""
    call_indexes: TokenColumn
    """[n] index of the token in its call's completion."""
    call_ids: tuple[str, ...]
    """Calls with an occurrence in this row."""
    first_versions: tuple[PolicyVersion, ...]
    """Per entry of call_ids: first version of its interval."""
    last_versions: tuple[PolicyVersion, ...]

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if len(self.positions) != len(self.tokens):
            raise ValueError("row: positions and tokens differ in length")
        if len(self.segment_starts) != len(self.range_counts) + 1:
            raise ValueError("row: segment_starts must be one longer than range_counts")
        if self.segment_starts[0] != 0 or self.segment_starts[-1] != len(self.tokens):
            raise ValueError("row: segment_starts must go from 0 to the number of tokens")
        if len(self.range_starts) != len(self.range_ends):
            raise ValueError("row: range_starts and range_ends differ in length")
        columns = (
            self.targets, self.engine_logprobs, self.temperatures, self.weights,
            self.advantages, self.call_ordinals, self.call_indexes,
        )  # fmt: skip
        if any(len(column) != len(self.sources) for column in columns):
            raise ValueError("row: columns of trained occurrences differ in length")
        if not len(self.call_ids) == len(self.first_versions) == len(self.last_versions):
            raise ValueError("row: call_ids and versions differ in length")
        return self
