"""Packing: how full rows are, and what a batch computes, for each builder and two row sizes.

A batch is ROLLOUTS rollouts of a preset for prefix_tree, a new task each group; FEW_GROUPS groups for
the other builders, which compute up to 30 times as much. All figures are token counts and do not depend
on the machine, but `seconds`, the process time of packing.

How full rows are depends on a batch's rollouts. So `row_fill_of_batches` has BATCHES batches for each target
(TARGETS), each with tasks of its own, and the `row_fill` of all presets is the mean of deep-agent's.

`row_fill`: tokens of the rows over rows x row size; ancestors that a row repeats are tokens that it
computes, and are told apart as `repeated_over_unique`. `unique`: distinct (prefix, token) pairs on
trained paths, summed over the groups; groups of a batch share a system prompt, so computed may be
below unique. `least_over_unique`: no cut of the batch's tree into such rows computes less.
`work_of_8_ranks`: most work of a rank over the mean. `trained`: shares of the sampled tokens of
delivered calls, by reading the rows back; `polar_merging` is NVIDIA Polar's rule on the same input.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from bench.record import parser, record
from bench.reference_builders import WholeCall, expand, judge, per_request, polar_merging, total
from bench.workloads import PRESETS, GroupLoad, make_group, stitch_group
from polar.core.advantages import AdvantageRule
from polar.core.batching import BatchChoice, BatchRule, make_batch
from polar.core.grouping import GroupState
from polar.core.rank_shares import rank_rows, row_work
from polar.core.row_reading import RowBranches, ints
from polar.core.trained_calls import trained_batch
from polar.core.tree_cutting import least_tokens
from schemas.batches import BatchManifest, Builder, PackedRow
from schemas.group_events import GroupMember, GroupMembersFixed, GroupOpened
from schemas.groups import ScoredGroup
from schemas.ids import trajectory_id
from schemas.rewards import Reward, reward_id
from schemas.sessions import Outcome
from schemas.tasks import RewardSpec

ROLLOUTS = 1_024
FEW_GROUPS = 1
BATCHES = 3
ROWS = {"32k": 32_768, "128k": 131_072}
BUILDERS: tuple[Builder, ...] = ("prefix_tree", "prefix_merging", "per_request")
RANKS = 8
TARGETS = {"polar-swe": "32k", "deep-agent": "128k"}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and record; `argv` without the program's name."""
    options = parser("packing", __doc__)
    options.add_argument("--rollouts", type=int, default=ROLLOUTS, help="rollouts of a batch")
    options.add_argument("--batches", type=int, default=BATCHES, help="batches whose row fill is told")
    chosen = options.parse_args(argv)
    groups = {name: max(1, chosen.rollouts // preset.members) for name, preset in PRESETS.items()}
    presets = {name: measured(name, groups[name]) for name in PRESETS}
    fills = {
        name: [
            presets[name][size]["prefix_tree"]["row_fill"],
            *(row_fill(name, size, groups[name], number) for number in range(1, chosen.batches)),
        ]
        for name, size in TARGETS.items()
    }
    record(
        "packing",
        {
            "row_fill": fmean(fills["deep-agent"]),
            "row_fill_of_batches": fills,
            "computed_over_unique": presets["tau2-like"]["computed_over_unique"],
            "rollouts": chosen.rollouts,
            "presets": presets,
        },
        only_json=chosen.json,
    )
    return 0


def measured(name: str, count: int) -> dict[str, Any]:
    """All figures of one preset."""
    first, *others = [make_group(name, number) for number in range(count)]
    group = scored(first)
    groups = [group, *map(scored, others)]
    sizes = {
        size: {
            builder: packed(groups if builder == "prefix_tree" else groups[:FEW_GROUPS], builder, tokens)
            for builder in BUILDERS
        }
        for size, tokens in ROWS.items()
    }
    headline = sizes["128k"]["prefix_tree"]
    return {
        **{key: headline[key] for key in ("row_fill", "computed_over_unique", "unique_over_naive")},
        **sizes,
        "trained": {
            "prefix_tree": trained(first, batch([group], "prefix_tree", ROWS["128k"])[1]),
            "per_request": total([judge(per_request(each), each) for each in first.members]),
            "polar_merging": total([judge(polar_merging(each), each) for each in first.members]),
        },
    }


def row_fill(name: str, size: str, groups: int, number: int) -> float:
    """Of batch `number` of a preset, in rows of a size; packed by prefix_tree."""
    loads = (make_group(name, groups * number + at) for at in range(groups))
    manifest, _ = batch([scored(load) for load in loads], "prefix_tree", ROWS[size])
    found = manifest.metrics["row_fill"]
    assert isinstance(found, float)
    return found


def scored(load: GroupLoad) -> ScoredGroup:
    """The group as the grouper hands it over."""
    trajectories = {trajectory_id(each.session_id): each for each in stitch_group(load)}
    sessions = [member.opened.session_id for member in load.members]
    rewards = [
        Reward(
            reward_id=reward_id(member.opened.session_id, "score", "bench", "1"),
            session_id=member.opened.session_id,
            group_id=load.group_id,
            name="score",
            value=member.reward,
            evaluator="bench",
        )
        for member in load.members
    ]
    state = GroupState(
        GroupOpened(
            group_id=load.group_id,
            policy="policy",
            size=len(sessions),
            reward=RewardSpec(required=("score",)),
        ),
        GroupMembersFixed(
            group_id=load.group_id,
            members=tuple(GroupMember(session_id=each, outcome=Outcome.COMPLETED) for each in sessions),
        ),
        trajectories,
        {reward.reward_id: reward for reward in rewards},
    )
    return state.score(state.seal("complete"), AdvantageRule())


def batch(
    groups: Sequence[ScoredGroup], builder: Builder, row_tokens: int
) -> tuple[BatchManifest, list[PackedRow]]:
    """Manifest and rows of these groups."""
    rule = BatchRule(builder=builder, row_tokens=row_tokens)
    return make_batch(0, BatchChoice(list(groups), []), rule, None)


def packed(groups: Sequence[ScoredGroup], builder: Builder, row_tokens: int) -> dict[str, float]:
    """The figures of one batch."""
    start = time.process_time()
    manifest, _ = batch(groups, builder, row_tokens)
    seconds = time.process_time() - start
    metrics = manifest.metrics
    unique, repeated = metrics["unique_tokens"], metrics["repeated_ancestor_tokens"]
    assert isinstance(unique, float)
    assert isinstance(repeated, float)
    tree = trained_batch(groups, row_tokens).tree
    return {
        "groups": len(groups),
        "rows": manifest.row_count,
        "row_fill": metrics["row_fill"],
        "computed_over_unique": metrics["computed_over_unique"],
        "least_over_unique": least_tokens(tree, row_tokens) / unique,
        "repeated_over_unique": repeated / unique,
        "unique_over_naive": metrics["unique_over_naive"],
        "unique_tokens": int(unique),
        "truncated_calls": metrics["truncated_calls"],
        "work_of_8_ranks": work_of_ranks(manifest),
        "seconds": seconds,
    }


def work_of_ranks(manifest: BatchManifest) -> float:
    """Most work of a rank over the mean."""
    work = row_work(manifest)
    loads = [sum(work[row] for row in share) for share in rank_rows(manifest, RANKS)]
    return max(loads) * RANKS / sum(loads)


def trained(load: GroupLoad, rows: Sequence[PackedRow]) -> Mapping[str, float]:
    """Read rows back: sampled tokens of delivered calls that are trained once and under exactly the
    ids before them; those that are trained otherwise or again; those that are not."""
    calls = {
        f"{member.opened.session_id}#{seq}": call
        for member in load.members
        for seq, call in expand(member).items()
    }
    times: Counter[tuple[str, int]] = Counter()
    wrong = 0
    for row in rows:
        for call_id, indexes, is_faithful in occurrences(row, calls):
            times.update((call_id, index) for index in indexes)
            wrong += 0 if is_faithful else len(indexes)
    sampled = sum(len(call.sampled) for call in calls.values())
    once = sum(count == 1 for count in times.values())
    return {
        "computed_tokens": float(sum(len(row.tokens) for row in rows)),
        "faithful": (once - wrong) / sampled,
        "unfaithful": (wrong + len(times) - once) / sampled,
        "dropped": 1 - len(times) / sampled,
    }


def occurrences(row: PackedRow, calls: Mapping[str, WholeCall]) -> list[tuple[str, list[int], bool]]:
    """Per call of a row: (call id, indexes that are trained, whether all have their exact prefix)."""
    branches, tokens = RowBranches.of(row), ints(row.tokens)
    sources, targets, indexes = ints(row.sources), ints(row.targets), ints(row.call_indexes)
    ordinals = ints(row.call_ordinals)
    order = np.argsort(ordinals, kind="stable")
    splits = np.searchsorted(ordinals[order], np.arange(len(row.call_ids) + 1))
    found = []
    for at, call_id in enumerate(row.call_ids):
        own = order[splits[at] : splits[at + 1]]
        whole = np.concatenate([calls[call_id].prompt, calls[call_id].sampled])
        depths = len(calls[call_id].prompt) + indexes[own]
        path = branches.path(int(branches.segment_of(sources[own]).max()))
        size = int(depths.max())
        is_faithful = (
            np.array_equal(tokens[path[:size]], whole[:size])
            and np.array_equal(path[depths - 1], sources[own])
            and np.array_equal(whole[depths], targets[own])
        )
        found.append((call_id, indexes[own].tolist(), bool(is_faithful)))
    return found


if __name__ == "__main__":
    sys.exit(main())
