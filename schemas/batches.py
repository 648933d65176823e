"""polar.batches.v1: a BatchManifest, then its PackedRows."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.base import Event, WireModel
from schemas.columns import FloatColumn, TokenColumn
from schemas.policies import PolicyVersion
from schemas.trees import ListedItem

Builder = Literal["per_request", "prefix_merging"]


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
    live_rollouts: Annotated[int, Field(ge=0)]
    """Denominator of the loss: each of these has the share 1 / live_rollouts."""
    trained_tokens: Annotated[int, Field(ge=0)]
    """Occurrences over all rows."""
    mean_reward: float | None = None
    """Mean score of the scored members of `groups`."""
    metrics: dict[str, float | dict[str, float]] = {}
    """row_fill, unique_tokens, naive_tokens, …"""
    algorithm: str


class PackedRow(Event):
    """One row for the trainer: several causal sequences side by side, none seeing another.

    Let t be the row's tokens and n its trained occurrences.
    """

    type: Literal["PackedRow"] = "PackedRow"
    policy: str
    batch_number: int
    index: int
    """0 .. row_count - 1."""
    tokens: TokenColumn
    """[t] token ids."""
    positions: TokenColumn
    """[t] position of each token in its own sequence, from 0."""
    sequence_starts: TokenColumn
    """[sequences + 1] offsets of the sequences in `tokens` (cu_seqlens)."""
    sources: TokenColumn
    """[n] row offset at which the target is predicted (offset of the token before it)."""
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
        columns = (
            self.targets, self.engine_logprobs, self.temperatures, self.weights,
            self.advantages, self.call_ordinals, self.call_indexes,
        )  # fmt: skip
        if any(len(column) != len(self.sources) for column in columns):
            raise ValueError("row: columns of trained occurrences differ in length")
        if not len(self.call_ids) == len(self.first_versions) == len(self.last_versions):
            raise ValueError("row: call_ids and versions differ in length")
        return self
