"""Stitching: new tokens a second on one core, peak memory, and what each rule trains faithfully.

A new token is one that a record carries (new prompt ids and sampled ids); what a delta refers to is
not counted again. `stitch` starts from decoded records, `decode` from the bytes on the log. Times are
the best of several runs, in seconds of this process, so that a busy machine distorts them least.
`peak_bytes_over_unique` is the most memory that Python held for a member, its trajectory included,
over 4 bytes a unique token. Per preset, `ours`, `per_request` and `polar_merging` say how many
tokens are computed and what share of the sampled tokens of delivered calls is trained under exactly
the prefix that the engine saw. What `ours` does not train is `listed` with a reason (titles, routing).

Recorded harness traffic is a further workload where POLAR_FIXTURES_DIR names its folder and SmolLM2
was prepared (`python -m polar.engines.models smollm2`); without, the result says that it was skipped.
"""

import os
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.record import parser, record
from bench.reference_builders import expand, judge, per_request, polar_merging, total
from bench.workloads import PRESETS, GroupLoad, SessionLoad, make_group, stitch_group
from polar.core.prefix_tree import TreePaths
from polar.core.stitching import stitch
from polar.engines.model_cache import default_cache_dir
from polar.engines.models import SMOLLM2
from schemas.base import encode
from schemas.codec import decode
from schemas.topics import CALLS
from schemas.trajectories import Trajectory

HEADLINE = "deep-agent"
FIXTURES = "POLAR_FIXTURES_DIR"
SCALES = (1, 4, 16)
"""Times the calls of the headline preset's main chain, for one member."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and record; `argv` without the program's name."""
    options = parser("stitching", __doc__)
    options.add_argument("--repeats", type=int, default=15, help="runs of which the best counts")
    chosen = options.parse_args(argv)
    presets = {name: measured(make_group(name), chosen.repeats) for name in PRESETS}
    headline = presets[HEADLINE]
    record(
        "stitching",
        {
            "tokens_per_s": headline["tokens_per_s"],
            "peak_bytes_over_unique": headline["peak_bytes_over_unique"],
            "decode_tokens_per_s": headline["decode_tokens_per_s"],
            "presets": presets,
            "tokens_per_s_by_length": by_length(chosen.repeats),
            "recorded": recorded(chosen.repeats),
        },
        only_json=chosen.json,
    )
    return 0


def measured(load: GroupLoad, repeats: int) -> dict[str, Any]:
    """All figures of one group."""
    trajectories = stitch_group(load)
    unique = sum(len(each.tree.tokens) for each in trajectories)
    written = [encode(each) for each in load.records]
    seconds = best_seconds(lambda: stitch_group(load), repeats)
    decode_seconds = best_seconds(lambda: [decode(each, CALLS) for each in written], max(1, repeats // 5))
    return {
        "calls": len(load.records),
        "new_tokens": load.new_tokens,
        "tokens_per_s": load.new_tokens / seconds,
        "decode_tokens_per_s": load.new_tokens / decode_seconds,
        "peak_bytes_over_unique": max(map(peak_over_unique, load.members)),
        "unique_over_naive": unique / load.naive_tokens,
        "causes": causes(trajectories),
        "ours": ours(load.members, trajectories),
        "per_request": total([judge(per_request(each), each) for each in load.members]),
        "polar_merging": total([judge(polar_merging(each), each) for each in load.members]),
    }


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    """Shortest time of this process for one run."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def peak_over_unique(member: SessionLoad) -> float:
    """Peak of what stitching a member allocates, over the column of its unique tokens."""
    tracemalloc.start()
    try:
        trajectory = stitch(member.opened, member.records, member.sealed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak / (4 * len(trajectory.tree.tokens))


def ours(members: Sequence[SessionLoad], trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
    """Tokens of the trees, and sampled tokens that lie behind exactly their call's prompt."""
    sampled = faithful = 0
    for member, trajectory in zip(members, trajectories, strict=True):
        paths, whole = TreePaths(trajectory.tree), expand(member)
        usable = {call.seq: call for call in trajectory.calls if call.untrainable is None}
        for seq, call in whole.items():
            sampled += len(call.sampled)
            there = usable.get(seq)
            if there is not None and np.array_equal(
                paths.path(there.end_run, there.end_offset), np.concatenate([call.prompt, call.sampled])
            ):
                faithful += there.sampled_tokens - len(there.masked)
    return {
        "computed_tokens": float(sum(len(each.tree.tokens) for each in trajectories)),
        "faithful": faithful / sampled,
        "listed": 1 - faithful / sampled,
    }


def causes(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """Splits by cause."""
    counted = Counter(split.cause for each in trajectories for call in each.calls for split in call.splits)
    return dict(sorted(counted.items()))


def by_length(repeats: int) -> dict[str, float]:
    """Tokens a second of longer and longer sessions of one member: linear means equal."""
    figures = {}
    for scale in SCALES:
        preset = replace(PRESETS[HEADLINE], name=f"{HEADLINE}-{scale}", members=1, calls=60 * scale)
        load = make_group(preset)
        seconds = best_seconds(lambda load=load: stitch_group(load), max(3, repeats // scale))
        figures[f"{load.new_tokens} tokens, {len(load.records)} calls"] = load.new_tokens / seconds
    return figures


def recorded(repeats: int) -> Mapping[str, Any]:
    """Real harness traffic by harness; what is missing where it cannot be read."""
    folder, tokenizer = os.environ.get(FIXTURES, ""), default_cache_dir() / SMOLLM2
    if not folder or not Path(folder).is_dir():
        return {"skipped": f"{FIXTURES} names no folder"}
    if not tokenizer.is_dir():
        return {"skipped": "SmolLM2 is not prepared: python -m polar.engines.models smollm2"}
    from bench.recorded_harnesses import read_sessions

    by_harness: dict[str, list[SessionLoad]] = {}
    for name, member in read_sessions(Path(folder), tokenizer).items():
        by_harness.setdefault(name.split("/", maxsplit=1)[0], []).append(member)
    return {
        name: measured(GroupLoad(PRESETS[HEADLINE], name, members), repeats)
        for name, members in by_harness.items()
    }


if __name__ == "__main__":
    sys.exit(main())
