"""Batches from a handful of invented rollouts, packed by the project's own packer."""

import random

from polar.core.packing import pack
from polar.core.prefix_tree import PrefixTree, as_tokens
from schemas.base import digest_of
from schemas.batches import BatchManifest, Builder, PackedRow
from schemas.columns import FloatColumn, TokenColumn
from schemas.groups import ScoredGroup, ScoredMember
from schemas.policies import PolicyInterval, PolicyVersion
from schemas.sessions import Outcome
from schemas.trees import StitchedCall
from tests.unit.trainer.tiny_models import VOCAB

BASE = PolicyVersion(lineage="run-a", step=0)


def row(
    sequences: list[list[int]],
    occurrences: list[tuple[int, int]],
    *,
    temperature: float = 1.0,
    version: PolicyVersion = BASE,
    **columns: list[float],
) -> PackedRow:
    """One row by hand. occurrences: (sequence, index of the trained token in it)."""
    tokens = [token for sequence in sequences for token in sequence]
    starts = [sum(len(s) for s in sequences[:i]) for i in range(len(sequences) + 1)]
    at = [starts[sequence] + index for sequence, index in occurrences]
    n = len(at)
    return PackedRow(
        policy="policy",
        batch_number=0,
        index=0,
        tokens=TokenColumn(tokens),
        positions=TokenColumn([i for sequence in sequences for i in range(len(sequence))]),
        segment_starts=TokenColumn(starts),
        range_counts=TokenColumn([0] * len(sequences)),
        range_starts=TokenColumn(),
        range_ends=TokenColumn(),
        sources=TokenColumn([i - 1 for i in at]),
        targets=TokenColumn([tokens[i] for i in at]),
        engine_logprobs=FloatColumn(columns.get("engine_logprobs", [-5.0] * n)),
        temperatures=FloatColumn([temperature] * n),
        weights=FloatColumn(columns.get("weights", [1.0 / max(n, 1)] * n)),
        advantages=FloatColumn(columns.get("advantages", [1.0] * n)),
        call_ordinals=TokenColumn([0] * n),
        call_indexes=TokenColumn(range(n)),
        call_ids=("s#1",),
        first_versions=(version,),
        last_versions=(version,),
    )


def group(seed: int, version: PolicyVersion = BASE, members: int = 4) -> ScoredGroup:
    """Members with a common prompt, two or three calls each; every call continues the last."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(2, VOCAB) for _ in range(count)]

    tree, placed, scored = PrefixTree(), [], []
    prompt = ids(9)
    advantages = [rng.choice((-1.0, 0.5, 1.25)) for _ in range(members)]
    for member in range(members):
        session, path, trained = f"task-{seed}/{member}/0/1", list(prompt), 0
        for seq in range(1, 3 + member % 2):
            completion = ids(2 + rng.randrange(4))
            position = tree.insert(as_tokens(path + completion))
            placed.append((session, seq, position, len(path), len(completion)))
            path += [*completion, *ids(3)]
            trained += len(completion)
        scored.append(
            ScoredMember(
                session_id=session,
                outcome=Outcome.COMPLETED,
                score=0.0,
                advantage=advantages[member],
                trained_tokens=trained,
            )
        )
    exported = tree.export()
    calls = []
    for session, seq, position, depth, sampled in placed:
        run, offset = exported.locate(position)
        calls.append(
            StitchedCall(
                call_id=f"{session}#{seq}",
                session_id=session,
                seq=seq,
                end_run=run,
                end_offset=offset,
                prompt_tokens=depth,
                sampled_tokens=sampled,
                logprobs=FloatColumn([-4.0 - rng.random() * 3 for _ in range(sampled)]),
                temperature=rng.choice((1.0, 0.7)),
                policy=PolicyInterval(first=version, last=version),
            )
        )
    return ScoredGroup(
        group_id=f"task-{seed}",
        policy="policy",
        live=True,
        tree=exported.tree,
        calls=tuple(calls),
        members=tuple(scored),
        estimator="by hand",
        algorithm="by hand",
    )


def batch(
    number: int,
    *seeds: int,
    builder: Builder = "prefix_merging",
    row_tokens: int = 64,
    version: PolicyVersion = BASE,
) -> tuple[BatchManifest, tuple[PackedRow, ...]]:
    """Manifest and rows of a batch of `group(seed)`; without seeds a batch with nothing live."""
    groups = [group(seed, version) for seed in seeds]
    packed = pack(groups, builder=builder, row_tokens=row_tokens, policy="policy", batch_number=number)
    names = tuple(item.group_id for item in groups)
    manifest = BatchManifest(
        policy="policy",
        number=number,
        groups=names or ("dead",),
        live_groups=names,
        policy_version=version,
        builder=builder,
        row_tokens=row_tokens,
        row_count=len(packed.rows),
        rows_digest=digest_of(*packed.rows),
        row_lengths=TokenColumn(len(each.tokens) for each in packed.rows),
        row_pairs=packed.row_pairs,
        live_rollouts=packed.live_rollouts,
        trained_tokens=packed.trained_tokens,
        mean_reward=0.5,
        algorithm="by hand",
    )
    return manifest, packed.rows
