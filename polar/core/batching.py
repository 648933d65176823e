"""Which groups make a batch, and the rows that follow from a manifest.

Invariants: the rows are a pure function of the manifest and its groups; the digest over them
proves it. A manifest is the decision, written before its rows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from polar.core.batch_metrics import group_metrics, sharing_ratios
from polar.core.faithfulness import faithful_share
from polar.core.grouping import trained_tokens
from polar.core.packing import ALGORITHM, PackedBatch, pack
from polar.core.staleness import PolicyLineages
from schemas.base import digest_of
from schemas.batches import BatchManifest, Builder, PackedRow
from schemas.columns import TokenColumn
from schemas.groups import ScoredGroup
from schemas.policies import PolicyVersion
from schemas.trees import ListedItem


class BatchMismatchError(ValueError):
    """Rows do not belong to their manifest; the message says how they differ."""


@dataclass(frozen=True, slots=True)
class BatchRule:
    """How groups become batches."""

    policy: str = "policy"
    groups_per_batch: int = 3
    row_tokens: int = 4096
    builder: Builder = "prefix_tree"
    max_staleness: int = 8
    """In versions; exactly so many is still trained."""


def staleness_of(group: ScoredGroup, lineages: PolicyLineages) -> int:
    """Largest staleness over the trained calls of a group, at their first version."""
    scored = {member.session_id for member in group.members if member.excluded is None}
    versions = {
        call.policy.first for call in group.calls if trained_tokens(call) and call.session_id in scored
    }
    return max((lineages.staleness(version) for version in versions), default=0)


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """Groups taken off the stream, in order of arrival."""

    taken: list[ScoredGroup]
    excluded: list[tuple[ScoredGroup, ListedItem]]


def choose(arrived: Iterable[ScoredGroup], rule: BatchRule, lineages: PolicyLineages) -> BatchChoice | None:
    """The next batch out of groups in order of arrival; None while there are too few fresh ones."""
    taken: list[ScoredGroup] = []
    excluded: list[tuple[ScoredGroup, ListedItem]] = []
    for group in arrived:
        stale = staleness_of(group, lineages)
        if group.live and stale > rule.max_staleness:
            detail = f"{stale} versions old, {rule.max_staleness} are allowed"
            excluded.append((group, ListedItem(id=group.group_id, reason="stale", detail=detail)))
            continue
        taken.append(group)
        if len(taken) == rule.groups_per_batch:
            return BatchChoice(taken, excluded)
    return None


def make_batch(
    number: int, choice: BatchChoice, rule: BatchRule, policy_version: PolicyVersion | None
) -> tuple[BatchManifest, list[PackedRow]]:
    """The decision record of a batch, and its rows."""
    packed = pack(
        choice.taken,
        builder=rule.builder,
        row_tokens=rule.row_tokens,
        policy=rule.policy,
        batch_number=number,
    )
    manifest = _manifest(
        number,
        choice.taken,
        packed,
        rule,
        excluded=tuple(item for _, item in choice.excluded),
        policy_version=policy_version,
    )
    return manifest, list(packed.rows)


def _manifest(
    number: int,
    groups: Sequence[ScoredGroup],
    packed: PackedBatch,
    rule: BatchRule,
    *,
    excluded: tuple[ListedItem, ...],
    policy_version: PolicyVersion | None,
) -> BatchManifest:
    scores = [member.score for group in groups for member in group.members if member.score is not None]
    return BatchManifest(
        policy=rule.policy,
        number=number,
        groups=tuple(group.group_id for group in groups),
        live_groups=tuple(group.group_id for group in groups if group.live),
        excluded=excluded,
        truncated=packed.truncated,
        policy_version=policy_version,
        builder=rule.builder,
        row_tokens=rule.row_tokens,
        row_count=len(packed.rows),
        rows_digest=digest_of(*packed.rows),
        row_lengths=TokenColumn(len(row.tokens) for row in packed.rows),
        row_pairs=packed.row_pairs,
        live_rollouts=packed.live_rollouts,
        trained_tokens=packed.trained_tokens,
        mean_reward=math.fsum(scores) / len(scores) if scores else None,
        metrics={
            **packed.metrics,
            **sharing_ratios(packed.metrics),
            "faithful_share": faithful_share(groups, packed.rows),
            **group_metrics(groups),
        },
        algorithm=ALGORITHM,
    )


def remake_batch(
    manifest: BatchManifest,
    groups: Mapping[str, ScoredGroup],
    *,
    builder: Builder | None = None,
    row_tokens: int | None = None,
) -> tuple[BatchManifest, list[PackedRow]]:
    """The batch with the recorded number, members and order, made again from `groups` (which may
    have other rewards) and, where given, with another builder or row budget.

    Raises BatchMismatchError when a group of the manifest is not given.
    """
    chosen = _groups_of(manifest, groups)
    rule = BatchRule(
        policy=manifest.policy,
        builder=builder or manifest.builder,
        row_tokens=row_tokens or manifest.row_tokens,
    )
    packed = pack(
        chosen,
        builder=rule.builder,
        row_tokens=rule.row_tokens,
        policy=rule.policy,
        batch_number=manifest.number,
    )
    remade = _manifest(
        manifest.number,
        chosen,
        packed,
        rule,
        excluded=manifest.excluded,
        policy_version=manifest.policy_version,
    )
    return remade, list(packed.rows)


def rebuild_batch(manifest: BatchManifest, groups: Mapping[str, ScoredGroup]) -> list[PackedRow]:
    """The rows of a recorded manifest, byte for byte.

    Raises BatchMismatchError when a group is not given or the rows' digest is another one (the
    batch was made by another version of the algorithm).
    """
    _, rows = remake_batch(manifest, groups)
    check_rows(manifest, rows)
    return rows


def check_rows(manifest: BatchManifest, rows: Sequence[PackedRow]) -> None:
    """Raise BatchMismatchError unless these are the manifest's rows, whole and in order."""
    if len(rows) != manifest.row_count:
        raise BatchMismatchError(
            f"batch {manifest.number}: {len(rows)} rows, its manifest says {manifest.row_count}"
        )
    found = digest_of(*rows)
    if found != manifest.rows_digest:
        raise BatchMismatchError(
            f"batch {manifest.number}: rows have digest {found[:16]}…, its manifest says "
            f"{manifest.rows_digest[:16]}… (made by {manifest.algorithm}, this is {ALGORITHM})"
        )


def _groups_of(manifest: BatchManifest, groups: Mapping[str, ScoredGroup]) -> list[ScoredGroup]:
    missing = [group_id for group_id in manifest.groups if group_id not in groups]
    if missing:
        raise BatchMismatchError(f"batch {manifest.number}: groups {', '.join(missing)} are not there")
    return [groups[group_id] for group_id in manifest.groups]
