"""The given grpo cases, through rewards, seal, advantages and packed weights."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from polar.core.advantages import AdvantageRule
from polar.core.batching import BatchChoice, BatchRule, make_batch
from polar.core.grouping import GroupState
from polar.core.packing import pack
from polar.core.rank_shares import rank_rows
from polar.core.stitching import stitch
from schemas.batches import Builder, PackedRow
from schemas.group_events import GroupMember, GroupMembersFixed, GroupOpened
from schemas.groups import ScoredGroup
from schemas.ids import trajectory_id
from schemas.rewards import Reward, reward_id
from schemas.sessions import Outcome
from schemas.tasks import RewardSpec
from tests.unit.core.call_records import SessionRecords
from tests.unit.core.given_cases import Case, cases, number

OUTCOMES = {
    "ok": Outcome.COMPLETED,
    "agent_error": Outcome.AGENT_ERROR,
    "infra_error": Outcome.INFRA_ERROR,
    "aborted": Outcome.CANCELLED,
}
REASONS = {
    "no_trainable_tokens": {"no_trainable_token"},
    "bad_reward": {"bad_reward", "reward_missing"},  # a reward that is no number is never a Reward
    "aborted": {"cancelled"},
    "infra_error": {"infra_error"},
}
STATUS = {"ok": "", "zero_variance": "zero_variance", "empty": "empty"}
ROW_PROMPTS = 1000


def _rule(config: dict[str, Any]) -> AdvantageRule:
    assert config["baseline"] == "group_mean"
    assert config["std_ddof"] == 0
    return AdvantageRule(
        "group_mean_std" if config["norm_std"] else "group_mean", config["eps"], config["zero_variance_tol"]
    )


def _scored(group: dict[str, Any], rule: AdvantageRule) -> ScoredGroup:
    state = GroupState(
        GroupOpened(group_id=group["group"], policy="p", size=len(group["rollouts"]), reward=RewardSpec())
    )
    members = []
    for at, rollout in enumerate(group["rollouts"]):
        session = SessionRecords(f"{group['group']}/{at}/0/1")
        for row_at, row in enumerate(rollout["rows"]):
            logprobs = [
                number(value) if kept else math.nan
                for kept, value in zip(row["mask"], row["old_logprobs"], strict=True)
            ]
            session.call([ROW_PROMPTS + row_at], list(range(len(logprobs))), logprobs=logprobs)
        trajectory = stitch(session.opened, session.records, session.sealed(OUTCOMES[rollout["status"]]))
        state.trajectories[trajectory_id(session.session_id)] = trajectory
        members.append(GroupMember(session_id=session.session_id, outcome=OUTCOMES[rollout["status"]]))
        if rollout["reward"] is not None:
            fields = {
                "reward_id": reward_id(session.session_id, "outcome", "e", "1"),
                "session_id": session.session_id,
                "group_id": group["group"],
                "name": "outcome",
                "value": number(rollout["reward"]),
                "evaluator": "e",
            }
            if math.isnan(fields["value"]):
                with pytest.raises(ValidationError, match="not finite"):
                    Reward(**fields)
            else:
                state.rewards[fields["reward_id"]] = Reward(**fields)
    state.fixed = GroupMembersFixed(group_id=group["group"], members=tuple(members))
    return state.score(state.seal("complete"), rule)


@pytest.mark.parametrize("builder", ["per_request", "prefix_merging", "prefix_tree"])
@pytest.mark.parametrize("case", cases("grpo", given="groups"))
def test_advantages_shares_and_loss(case: Case, builder: Builder) -> None:
    given, expect = case["given"], case["expect"]
    scored = [_scored(group, _rule(given["config"])) for group in given["groups"]]
    names = {
        f"{group['group']}/{at}/0/1": rollout
        for group in given["groups"]
        for at, rollout in enumerate(group["rollouts"])
    }
    members = {
        names[member.session_id]["rollout"]: (member, group) for group in scored for member in group.members
    }
    for name, value in expect["advantages"].items():
        assert members[name][0].advantage == pytest.approx(value, abs=1e-6)
    excluded = {name: member.excluded for name, (member, _) in members.items() if member.excluded}
    wanted = {entry["rollout"]: REASONS[entry["reason"]] for entry in expect["excluded"]}
    assert set(excluded) == set(wanted)
    assert all(reason in wanted[name] for name, reason in excluded.items())
    for group in scored:
        assert group.reason == STATUS[expect["group_status"][group.group_id]]
        assert group.live == (group.reason == "")

    batch = pack(scored, builder=builder, row_tokens=64, policy="p", batch_number=0)
    rollout_share: dict[str, float] = {}
    row_share: dict[str, float] = {}
    for row in batch.rows:
        for weight, ordinal in zip(row.weights, row.call_ordinals, strict=True):
            rollout, given_row = _given_row(names, row.call_ids[ordinal])
            rollout_share[rollout] = rollout_share.get(rollout, 0) + weight
            row_share[given_row["row"]] = row_share.get(given_row["row"], 0) + weight
    assert rollout_share == pytest.approx(expect["rollout_share"], abs=1e-6)
    assert row_share == pytest.approx(expect["row_share"], abs=1e-6)
    assert sum(_loss(row, names) for row in batch.rows) == pytest.approx(expect["loss"], abs=1e-6)
    if expect.get("step_skipped"):
        assert batch.rows == ()


def _given_row(names: dict[str, Any], call_id: str) -> tuple[str, dict[str, Any]]:
    """(rollout, row) of a case that a call stands for."""
    session_id, _, seq = call_id.partition("#")
    return names[session_id]["rollout"], names[session_id]["rows"][int(seq) - 1]


def _loss(row: PackedRow, names: dict[str, Any]) -> float:
    """What a row adds to the loss, without clipping."""
    total = 0.0
    for at, ordinal in enumerate(row.call_ordinals):
        _, given_row = _given_row(names, row.call_ids[ordinal])
        ratio = math.exp(given_row["new_logprobs"][row.call_indexes[at]] - row.engine_logprobs[at])
        total -= row.weights[at] * row.advantages[at] * ratio
    return total


@pytest.mark.parametrize("builder", ["per_request", "prefix_merging", "prefix_tree"])
@pytest.mark.parametrize(
    "case",
    [case for case in cases("grpo", given="groups") if "ranks" in case.values[0].get("expect", "ranks")],
)
def test_the_loss_does_not_depend_on_the_number_of_ranks(case: Case, builder: Builder) -> None:
    given, expect = case["given"], case["expect"]
    scored = [_scored(group, _rule(given["config"])) for group in given["groups"]]
    names = {
        f"{group['group']}/{at}/0/1": rollout
        for group in given["groups"]
        for at, rollout in enumerate(group["rollouts"])
    }
    rule = BatchRule(builder=builder, row_tokens=4)  # a given row with its prompt, or two short ones
    manifest, rows = make_batch(0, BatchChoice(scored, []), rule, None)
    shares = rank_rows(manifest, expect["ranks"])
    assert sorted(index for share in shares for index in share) == list(range(len(rows)))
    assert len(shares) == expect["ranks"]
    assert max(map(len, shares)) <= expect["micro_batches_per_rank"]
    by_rank = [sum(_loss(rows[index], names) for index in share) for share in shares]
    assert sum(by_rank) == pytest.approx(expect["loss"], abs=1e-6)


@pytest.mark.parametrize("case", cases("grpo", given="records"))
def test_the_meaning_of_logprobs_travels_with_each_record(case: Case) -> None:
    given, expect = case["given"], case["expect"]
    accepted, temperatures = True, {}
    for record in given["records"]:
        session = SessionRecords("t/0/0/1")
        try:
            session.call(
                [1],
                [2],
                logprobs_mode=record["logprobs_mode"],
                sampling_used={"temperature": record["temperature"]},
            )
        except ValidationError:
            accepted = False
            continue
        (call,) = stitch(session.opened, session.records, session.sealed()).calls
        accepted = accepted and call.untrainable is None
        temperatures[record["rollout"]] = call.temperature
    if "one_of" in expect:
        assert accepted
        assert temperatures == expect["one_of"][1]["per_record_temperature_used"]
    else:
        assert accepted == expect["accepted"]
