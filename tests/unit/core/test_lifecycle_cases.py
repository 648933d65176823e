"""The given lifecycle cases that concern the stages, as a log.

A session's end is its SessionSealed behind the last call, so the waits for missing calls do not
arise; members are fixed by the scheduler, here once all have ended or at the given deadline.
Canaries, routing and shutdown belong to other services and are tested there.
"""

from random import Random
from typing import Any

import pytest

from polar.core.batching import BatchRule, choose, staleness_of
from polar.core.grouper_stage import GrouperCore
from polar.core.grouping import trained_tokens
from polar.core.packer_stage import PackerCore
from polar.core.staleness import PolicyLineages
from polar.core.stitcher_stage import StitcherCore
from schemas.calls import Delivery
from schemas.group_events import GroupMember, GroupMembersFixed, GroupOpened
from schemas.groups import ScoredGroup
from schemas.policies import PolicyPublished, PolicyVersion
from schemas.rewards import Reward, reward_id
from schemas.sessions import Outcome
from schemas.tasks import RewardSpec
from schemas.topics import BATCHES, CALLS, GROUP_EVENTS, GROUPS, POLICIES, REWARDS, TRAJECTORIES
from schemas.trajectories import Trajectory
from tests.property.stream_world import MemoryLog, StageRun, run_until_quiet
from tests.unit.core.call_records import SessionRecords, interval
from tests.unit.core.given_cases import Case, cases

OF_OTHER_SERVICES = ("lifecycle-007", "lifecycle-008", "lifecycle-009", "lifecycle-011")
OUTCOMES = {"ok": Outcome.COMPLETED, "agent_error": Outcome.AGENT_ERROR, "infra_error": Outcome.INFRA_ERROR}
REASONS = {
    "infra_error": "infra_error",
    "no_calls": "no_trainable_token",
    "deadline": "timed_out",
}


class CaseLog:
    """Writes the events of a case as the services would."""

    def __init__(self, case: Case) -> None:
        self.config = case["given"]["config"]
        self.log = MemoryLog(groups=1, sessions=1)
        self.sessions: dict[str, SessionRecords] = {}
        self.ended: dict[str, Outcome] = {}
        self.names: dict[str, str] = {}
        self.versions = 0
        events = case["given"]["events"]
        for event in sorted(events, key=lambda event: (event["type"] == "session_end", event["t"])):
            getattr(self, f"_{event['type']}", lambda event: None)(event)
        self._fix_members()

    def _session_start(self, event: dict[str, Any]) -> None:
        group_id = event["group_id"]
        if group_id not in {session.group_id for session in self.sessions.values()}:
            opened = GroupOpened(
                group_id=group_id, policy="policy", size=self.config["group_size"], reward=RewardSpec()
            )
            self.log.write(opened)
        session_id = f"{group_id}/{len(self.sessions)}/0/1"
        self.names[session_id] = event["session_id"]
        self.sessions[event["session_id"]] = session = SessionRecords(session_id, group_id)
        self.log.write(session.opened)

    def _call(self, event: dict[str, Any]) -> None:
        session = self.sessions[event["session_id"]]
        record = session.call(
            event["prompt_ids"],
            event["completion_ids"],
            base=max(session.paths, default=None),
            logprobs=event["logprobs"],
            finish_reason=event["finish_reason"],
            delivery=Delivery(event["delivery"]),
            policy=interval(event["policy_version_min"], event["policy_version_max"]),
        )
        self.log.write(record)

    def _session_end(self, event: dict[str, Any]) -> None:
        session = self.sessions[event["session_id"]]
        outcome = OUTCOMES[event["status"]]
        self.ended[event["session_id"]] = outcome
        self.log.write(session.sealed(outcome, calls=event["expected_calls"]))
        if event["reward"] is not None:
            self.log.write(
                Reward(
                    reward_id=reward_id(session.session_id, "outcome", "e", "1"),
                    session_id=session.session_id,
                    group_id=session.group_id,
                    name="outcome",
                    value=event["reward"],
                    evaluator="e",
                )
            )

    def _trainer_version(self, event: dict[str, Any]) -> None:
        for step in range(event["version"] + 1):
            version = PolicyVersion(lineage="a", step=step)
            parent = PolicyVersion(lineage="a", step=step - 1) if step else None
            published = PolicyPublished(
                policy="policy", version=version, parent=parent, weights_path="w", weights_sha256="0"
            )
            self.log.write(published)

    def _fix_members(self) -> None:
        groups: dict[str, list[GroupMember]] = {}
        for name, session in self.sessions.items():
            outcome = self.ended.get(name, Outcome.TIMED_OUT)
            if name not in self.ended:
                self.log.write(session.sealed(outcome))  # the scheduler cancels it at the deadline
            groups.setdefault(session.group_id, []).append(
                GroupMember(session_id=session.session_id, outcome=outcome)
            )
        for group_id, members in groups.items():
            self.log.write(GroupMembersFixed(group_id=group_id, members=tuple(members)))


@pytest.mark.parametrize("case", cases("lifecycle", without=OF_OTHER_SERVICES))
def test_the_stages_end_where_the_case_says(case: Case) -> None:
    given = CaseLog(case)
    log, expect = given.log, case["expect"]
    rule = BatchRule(groups_per_batch=1, max_staleness=case["given"]["config"]["max_staleness"])
    runs = [
        StageRun(log, StitcherCore, (CALLS,)),
        StageRun(log, GrouperCore, (GROUP_EVENTS, TRAJECTORIES, REWARDS)),
        StageRun(log, lambda: PackerCore(rule), (GROUPS, BATCHES, POLICIES), from_start=(POLICIES,)),
    ]
    run_until_quiet(runs, Random(1), crash_rate=0.1, steps=30)
    trajectories: dict[str, Trajectory] = {}
    for event in log.of(Trajectory):
        trajectories.setdefault(given.names[event.session_id], event)
    groups = {event.group_id: event for event in log.of(ScoredGroup)}
    members = {given.names[m.session_id]: m for group in groups.values() for m in group.members}
    assert len(trajectories) == expect.get("emissions", len(trajectories))
    for name, wanted in expect.get("sessions", {}).items():
        trajectory, member = trajectories[name], members[name]
        assert len(trajectory.calls) == wanted.get("calls", len(trajectory.calls))
        missing = [item for item in trajectory.listed if item.reason == "missing_call"]
        assert len(missing) == wanted.get("missing_calls", 0)
        extra = any(item.reason == "unannounced_call" for item in trajectory.listed)
        assert extra == (wanted.get("anomaly") == "more_calls_than_announced")
        tokens = sum(map(trained_tokens, trajectory.calls))
        assert tokens == wanted.get("trained_tokens", tokens)
        assert (member.score is not None) == wanted.get("scored", member.score is not None)
        if "reward" in wanted:
            assert member.score == wanted["reward"]
        if "stale" in wanted:
            _check_staleness(log, groups[trajectory.group_id], wanted, rule)
    for group_id, wanted in expect.get("groups", {}).items():
        excluded = {given.names[m.session_id]: m.excluded for m in groups[group_id].members if m.excluded}
        assert excluded == {entry["session"]: REASONS[entry["reason"]] for entry in wanted["excluded"]}
        scored = [m for m in groups[group_id].members if m.score is not None]
        assert len(scored) == wanted.get("members", len(scored))
    for entry in expect.get("untrainable", ()):
        name, _, seq = entry["call"].partition("/")
        call = trajectories[name].calls[int(seq) - 1]
        assert call.untrainable == entry["reason"]
    assert runs[0].core.metrics()["open_sessions"] == 0


def _check_staleness(log: MemoryLog, group: ScoredGroup, wanted: dict[str, Any], rule: BatchRule) -> None:
    lineages = PolicyLineages(e for e in log.of(PolicyPublished) if isinstance(e, PolicyPublished))
    assert staleness_of(group, lineages) == wanted["staleness"]
    live = group.model_copy(update={"live": True})
    assert (choose([live], rule, lineages) is None) == wanted["stale"]
