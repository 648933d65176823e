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
        tokens, starts, positions = row.tokens.tolist(), row.sequence_starts.tolist(), row.positions.tolist()
        for source, target, logprob, ordinal, index in zip(
            row.sources, row.targets, row.engine_logprobs, row.call_ordinals, row.call_indexes, strict=True
        ):
            start = max(each for each in starts[:-1] if each <= source)
            end = min(each for each in starts[1:] if each > source)
            assert source + 1 < end, "the target lies in the same sequence"
            assert tokens[source + 1] == target
            assert positions[source] == source - start
            found[row.call_ids[ordinal], index, tuple(tokens[start : source + 1]), target, logprob] += 1
    return found


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
