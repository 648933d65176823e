"""What packed rows train, written out: one (prefix, token, log-prob, …) an occurrence."""

from collections import Counter
from collections.abc import Iterable

from schemas.batches import PackedRow
from schemas.groups import ScoredGroup, ScoredMember
from schemas.ids import trajectory_id
from schemas.sessions import Outcome
from schemas.trajectories import Trajectory

Occurrence = tuple[str, int, tuple[int, ...], int, float]
"""(call_id, index in the completion, exact prefix, target token, engine log-prob)."""


def trained_in(rows: Iterable[PackedRow]) -> Counter[Occurrence]:
    """Every occurrence of the rows with the causal prefix that a trainer would see."""
    found: Counter[Occurrence] = Counter()
    for row in rows:
        prefixes = prefixes_in(row)
        assert list(row.sources) == sorted(row.sources)
        for source, target, logprob, ordinal, index in zip(
            row.sources, row.targets, row.engine_logprobs, row.call_ordinals, row.call_indexes, strict=True
        ):
            found[row.call_ids[ordinal], index, prefixes[source], target, logprob] += 1
    return found


def prefixes_in(row: PackedRow) -> list[tuple[int, ...]]:
    """[t] the token at each row offset with all that it attends to, in order: plain loops."""
    tokens, starts = row.tokens.tolist(), row.segment_starts.tolist()
    ranges = list(zip(row.range_starts, row.range_ends, strict=True))
    prefixes: list[tuple[int, ...]] = []
    for segment, count in enumerate(row.range_counts):
        above = [at for start, end in ranges[:count] for at in range(start, end)]
        ranges = ranges[count:]
        assert all(at < starts[segment] for at in above)
        for at in range(starts[segment], starts[segment + 1]):
            seen = [*above, *range(starts[segment], at + 1)]
            prefixes.append(tuple(tokens[each] for each in seen))
            assert row.positions[at] == len(seen) - 1
            if above:
                assert prefixes[-1][: len(above)] == prefixes[above[-1]]
    assert not ranges
    return prefixes


def live_group(*trajectories: Trajectory, group_id: str = "t") -> ScoredGroup:
    """A live group of these trajectories with advantages ±1 in turn, without any reward."""
    from polar.core.advantages import AdvantageRule
    from polar.core.grouping import GroupState
    from schemas.group_events import GroupMember, GroupMembersFixed, GroupOpened
    from schemas.tasks import RewardSpec

    members = tuple(GroupMember(session_id=t.session_id, outcome=Outcome.COMPLETED) for t in trajectories)
    state = GroupState(
        GroupOpened(group_id=group_id, policy="policy", size=len(members), reward=RewardSpec(required=())),
        GroupMembersFixed(group_id=group_id, members=members),
        {trajectory_id(t.session_id): t for t in trajectories},
    )
    scored = state.score(state.seal("complete"), AdvantageRule())
    return scored.model_copy(
        update={
            "live": True,
            "members": tuple(
                ScoredMember(
                    session_id=member.session_id,
                    outcome=member.outcome,
                    score=float(index % 2),
                    advantage=float(1 - 2 * (index % 2)),
                    trained_tokens=member.trained_tokens,
                )
                for index, member in enumerate(scored.members)
            ),
        }
    )
