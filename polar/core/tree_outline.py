"""A trajectory's tree as people read it: branches, what their tokens are, who ends there.

Invariant: every token of the tree is counted once. A token that several calls sampled is of the
kind of the first usable one.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from polar.core.prefix_tree import TreePaths
from schemas.trajectories import Trajectory
from schemas.trees import StitchedCall

CONTEXT = "context"
UNTRAINABLE = "untrainable"
KINDS = (CONTEXT, "agent", "subagent", "compaction", "auxiliary", UNTRAINABLE)
"""What a token can be: context, sampled by a call of a kind, or sampled and not to be trained."""


def kind_of(call: StitchedCall) -> str:
    """The kind under which the sampled tokens of a call count. Auxiliary calls keep their kind,
    though they are not trained by default; a kind of another version counts as untrainable."""
    is_left_out = call.untrainable is not None and call.kind != "auxiliary"
    return UNTRAINABLE if is_left_out or call.kind not in KINDS else call.kind


@dataclass(frozen=True, slots=True)
class Branch:
    """One run of the tree: tokens without a fork."""

    run: int
    parent: int
    """-1 for a root."""
    depth: int
    """Tokens on the path above it."""
    tokens: int
    by_kind: dict[str, int]
    """Kind → tokens of this run; kinds without tokens are left out."""
    calls: tuple[StitchedCall, ...]
    """Calls whose last token lies here, by seq."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The whole tree."""

    branches: tuple[Branch, ...]
    """In the order of the tree's runs: depth first."""
    unplaced: tuple[StitchedCall, ...]
    """Calls without a token in the tree (`missing_base`, or nothing in them)."""
    by_kind: dict[str, int]
    """Kind → tokens of the tree."""
    unique_tokens: int
    """Tokens of the tree."""
    naive_tokens: int
    """Prompt and sampled tokens of all calls, each counted by itself."""


def outline(trajectory: Trajectory) -> Outline:
    """The outline of a session's tree."""
    paths = TreePaths(trajectory.tree)
    kinds = _token_kinds(trajectory.calls, paths)
    ending: dict[int, list[StitchedCall]] = {}
    for call in trajectory.calls:
        ending.setdefault(call.end_run, []).append(call)
    branches = tuple(
        Branch(
            run=run,
            parent=parent,
            depth=paths.depths[run],
            tokens=paths.length(run),
            by_kind=_counts(kinds[paths.starts[run] : paths.starts[run + 1]]),
            calls=tuple(ending.get(run, ())),
        )
        for run, parent in enumerate(paths.parents)
    )
    return Outline(
        branches=branches,
        unplaced=tuple(ending.get(-1, ())),
        by_kind=_counts(kinds),
        unique_tokens=len(kinds),
        naive_tokens=sum(call.prompt_tokens + call.sampled_tokens for call in trajectory.calls),
    )


def causes_of(calls: Iterable[StitchedCall]) -> Counter[str]:
    """Cause → calls that split off for it; a call counts once a cause."""
    return Counter(cause for call in calls for cause in {split.cause for split in call.splits})


def _token_kinds(
    calls: Iterable[StitchedCall], paths: TreePaths
) -> "np.ndarray[tuple[int], np.dtype[np.int8]]":
    """[tokens] index into KINDS of each token of the tree."""
    kinds = np.zeros(len(paths.tokens), dtype=np.int8)
    # What is written last stays: usable calls over others, earlier ones over later ones.
    for call in sorted(calls, key=lambda call: (call.untrainable is None, -call.seq)):
        run, extent = call.end_run, call.end_offset
        while run >= 0 and paths.depths[run] + extent > call.prompt_tokens:
            first = max(call.prompt_tokens - paths.depths[run], 0)
            kinds[paths.starts[run] + first : paths.starts[run] + extent] = KINDS.index(kind_of(call))
            run = paths.parents[run]
            extent = paths.length(run) if run >= 0 else 0
    return kinds


def _counts(kinds: "np.ndarray[tuple[int], np.dtype[np.int8]]") -> dict[str, int]:
    found = np.bincount(kinds, minlength=len(KINDS)).tolist()
    return {kind: count for kind, count in zip(KINDS, found, strict=True) if count}
