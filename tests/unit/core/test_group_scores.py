"""From rewards to the loss: one rollout is one share, and who cannot be compared is left out.

Groups are written as rollouts of branches of log-probs; NaN stands for a masked token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from polar.core.advantages import AdvantageRule
from polar.core.batching import BatchChoice, BatchRule, make_batch
from polar.core.grouping import GroupState
from polar.core.packing import pack
from polar.core.rank_shares import rank_rows
from polar.core.stitching import stitch
from schemas.batches import Builder
from schemas.group_events import GroupMember, GroupMembersFixed, GroupOpened
from schemas.groups import ScoredGroup
from schemas.ids import trajectory_id
from schemas.rewards import Reward, reward_id
from schemas.sessions import Outcome
from schemas.tasks import Estimator, RewardSpec
from tests.unit.core.call_records import SessionRecords

NAN = math.nan
MERGING: tuple[Builder, ...] = ("prefix_merging", "prefix_tree")
BUILDERS: tuple[Builder, ...] = ("per_request", *MERGING)


@dataclass
class Rollout:
    """A rollout; each branch is a call with a prompt of its own."""

    reward: float | None
    branches: Sequence[Sequence[float]] = field(default=((-1.0,),))
    outcome: Outcome = Outcome.COMPLETED
    temperature: float = 1.0


def group(*rollouts: Rollout, name: str = "g", estimator: Estimator = "group_mean") -> ScoredGroup:
    state = GroupState(
        GroupOpened(group_id=name, policy="p", size=len(rollouts), reward=RewardSpec(estimator=estimator))
    )
    members = []
    for number, rollout in enumerate(rollouts):
        session = SessionRecords(f"{name}/{number}/0/1")
        for branch, logprobs in enumerate(rollout.branches):
            kind = "subagent" if branch else "agent"
            session.call(
                [50 + branch],
                list(range(len(logprobs))),
                logprobs=logprobs,
                kind=kind,
                sampling_used={"temperature": rollout.temperature},
            )
        made = stitch(session.opened, session.records, session.sealed(rollout.outcome))
        state.trajectories[trajectory_id(session.session_id)] = made
        members.append(GroupMember(session_id=session.session_id, outcome=rollout.outcome))
        if rollout.reward is not None:
            given = Reward(
                reward_id=reward_id(session.session_id, "outcome", "e", "1"),
                session_id=session.session_id,
                group_id=name,
                name="outcome",
                value=rollout.reward,
                evaluator="e",
            )
            state.rewards[given.reward_id] = given
    state.fixed = GroupMembersFixed(group_id=name, members=tuple(members))
    return state.score(state.seal("complete"), state.rule(AdvantageRule()))


def advantages(scored: ScoredGroup) -> list[float]:
    return [round(member.advantage, 9) for member in scored.members]


def shares(*groups: ScoredGroup) -> dict[str, float]:
    """call_id → its part of the loss; equal for every builder."""
    found = []
    for builder in BUILDERS:
        part: dict[str, float] = {}
        for row in pack(groups, builder=builder, row_tokens=32, policy="p", batch_number=0).rows:
            for ordinal, weight in zip(row.call_ordinals, row.weights, strict=True):
                part[row.call_ids[ordinal]] = part.get(row.call_ids[ordinal], 0.0) + weight
        found.append({call: round(share, 6) for call, share in sorted(part.items())})
    assert found[1:] == found[:1] * len(MERGING)
    return found[0]


# -- the unit is the rollout ----------------------------------------------------------------------


def test_branches_of_a_rollout_have_no_votes_of_their_own() -> None:
    scored = group(Rollout(3.0, [[-1.0]] * 4), Rollout(0.0, [[-1.0, -1.0, -1.0]]), Rollout(0.0))
    assert advantages(scored) == [2.0, -1.0, -1.0]
    third = round(1 / 3, 6)
    assert shares(scored) == {
        **{f"g/0/0/1#{seq}": round(1 / 12, 6) for seq in (1, 2, 3, 4)},
        "g/1/0/1#1": third,
        "g/2/0/1#1": third,
    }


def test_tokens_of_a_rollout_are_equal_wherever_they_lie() -> None:
    part = shares(group(Rollout(1.0, [[-1.0] * 5, [-1.0, NAN, NAN], [-1.0] * 2]), Rollout(0.0)))
    assert part["g/0/0/1#1"] == pytest.approx(0.5 * 5 / 8)
    assert part["g/0/0/1#2"] == pytest.approx(0.5 * 1 / 8)


def test_a_rollout_at_the_mean_keeps_its_share() -> None:
    scored = group(Rollout(0.5), Rollout(1.0), Rollout(0.0))
    assert advantages(scored) == [0.0, 0.5, -0.5]
    assert set(shares(scored).values()) == {round(1 / 3, 6)}


def test_members_that_sample_the_same_tokens_are_occurrences_of_the_same_nodes() -> None:
    rollouts = [Rollout(float(n), [[-0.5 * n, -0.25]], temperature=0.5 + 0.25 * n) for n in range(8)]
    scored = group(*rollouts)
    assert len(scored.tree.tokens) == 3
    assert len(scored.calls) == 8
    for builder in MERGING:
        (row,) = pack([scored], builder=builder, row_tokens=8, policy="p", batch_number=0).rows
        assert row.tokens.tolist() == [50, 0, 1]
        occurrences = sorted(
            zip(row.sources, row.targets, row.advantages, row.engine_logprobs, row.temperatures, strict=True)
        )
        assert occurrences == [
            (source, source, n - 3.5, (-0.5 * n, -0.25)[source], 0.5 + 0.25 * n)
            for source in (0, 1)
            for n in range(8)
        ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
def test_the_loss_is_one_sum_however_many_ranks_share_it(ranks: int) -> None:
    rollouts = [Rollout(float(n % 3), [[-1.0] * (1 + n % 4)] * (1 + n % 2)) for n in range(11)]
    scored = group(*rollouts)
    manifest, rows = make_batch(
        0, BatchChoice([scored], []), BatchRule(row_tokens=6, builder="per_request"), None
    )
    assert len(rows) > 3
    dealt = rank_rows(manifest, ranks)
    weights = [sum(sum(rows[index].weights) for index in share) for share in dealt]
    assert len(weights) == ranks
    assert sorted(index for share in dealt for index in share) == list(range(len(rows)))
    assert math.fsum(weights) == pytest.approx(1.0, abs=1e-6)


# -- no spread ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-12, 123456.789])
@pytest.mark.parametrize("estimator", ["group_mean_std", "leave_one_out", "leave_one_out_std", "max_rl"])
def test_rounding_of_a_mean_makes_no_advantage(reward: float, estimator: Estimator) -> None:
    scored = group(*[Rollout(reward)] * 7, estimator=estimator)
    assert (scored.live, scored.reason, set(advantages(scored))) == (False, "zero_variance", {0.0})
    assert shares(scored) == {}


@pytest.mark.parametrize(("spread", "live"), [(1e-7, False), (9e-7, False), (2e-6, True)])
def test_the_border_of_no_spread_is_sharp(spread: float, live: bool) -> None:
    assert group(Rollout(2.0), Rollout(2.0), Rollout(2.0 + spread)).live == live


def test_one_loser_among_many_is_a_live_group() -> None:
    scored = group(Rollout(0.2), *[Rollout(1.0)] * 3)
    assert advantages(scored) == [-0.6, 0.2, 0.2, 0.2]


def test_a_dead_group_does_not_dilute_its_neighbour() -> None:
    dead, live = group(*[Rollout(1.0)] * 5, name="dead"), group(Rollout(1.0), Rollout(0.0), name="live")
    assert shares(dead, live) == shares(live) == {"live/0/0/1#1": 0.5, "live/1/0/1#1": 0.5}


# -- who is left out ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (Rollout(5.0, outcome=Outcome.INFRA_ERROR), "infra_error"),
        (Rollout(5.0, outcome=Outcome.CANCELLED), "cancelled"),
        (Rollout(5.0, outcome=Outcome.TIMED_OUT), "timed_out"),
        (Rollout(None), "reward_missing"),
        (Rollout(1e300), "bad_reward"),
        (Rollout(5.0, [[NAN, NAN]]), "no_trainable_token"),
        (Rollout(5.0, []), "no_trainable_token"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_who_cannot_be_compared_changes_neither_mean_nor_shares(odd: Rollout, reason: str) -> None:
    plain = group(Rollout(1.0), Rollout(0.0))
    scored = group(Rollout(1.0), Rollout(0.0), odd)
    assert [member.excluded for member in scored.members] == [None, None, reason]
    assert advantages(scored) == [*advantages(plain), 0.0]
    assert shares(scored) == shares(plain)


def test_an_agent_that_failed_without_a_reward_scores_zero() -> None:
    scored = group(Rollout(1.0), Rollout(None, outcome=Outcome.AGENT_ERROR))
    assert [member.score for member in scored.members] == [1.0, 0.0]
    assert advantages(scored) == [0.5, -0.5]


def test_one_survivor_has_nothing_to_be_compared_with() -> None:
    scored = group(Rollout(1.0), Rollout(None), Rollout(0.0, outcome=Outcome.INFRA_ERROR))
    assert (scored.live, scored.reason, shares(scored)) == (False, "single_survivor", {})


def test_a_batch_without_a_trainable_token_is_empty_and_finite() -> None:
    scored = group(Rollout(1.0, [[NAN, NAN]]), Rollout(0.0, [[NAN]]))
    assert (scored.live, scored.reason) == (False, "empty")
    batch = pack([scored], builder="prefix_merging", row_tokens=32, policy="p", batch_number=0)
    assert (batch.rows, batch.live_rollouts, batch.trained_tokens) == ((), 0, 0)
    assert all(math.isfinite(value) for value in batch.metrics.values())


def test_a_masked_token_never_reaches_a_row() -> None:
    scored = group(Rollout(1.0, [[-math.inf, -0.5, NAN, 0.5, -9999.0, -0.25]]), Rollout(0.0))
    (row,) = pack([scored], builder="prefix_merging", row_tokens=32, policy="p", batch_number=0).rows
    trained = sorted(
        (row.call_indexes[at], row.engine_logprobs[at])
        for at, ordinal in enumerate(row.call_ordinals)
        if row.call_ids[ordinal] == "g/0/0/1#1"
    )
    assert trained == [(1, -0.5), (5, -0.25)]
