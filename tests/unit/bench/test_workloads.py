"""The generated workloads are what their presets say, and the same on every call."""

import numpy as np
import pytest

from bench.played_session import RETOKENISED
from bench.workloads import PRESETS, make_group, stitch_group
from schemas.base import digest_of
from schemas.trees import Cause

SMALL = "polar-swe"


def causes(preset: str) -> set[Cause]:
    return {
        split.cause
        for each in stitch_group(make_group(preset))
        for call in each.calls
        for split in call.splits
    }


@pytest.mark.parametrize("name", [SMALL, "tau2-like-drift"])
def test_equal_arguments_give_equal_records(name: str) -> None:
    assert digest_of(*make_group(name).records) == digest_of(*make_group(name).records)
    assert digest_of(*make_group(name).records) != digest_of(*make_group(name, 1).records)


def test_a_drifting_preset_samples_what_its_plain_one_samples() -> None:
    plain, drifting = make_group("tau2-like"), make_group("tau2-like-drift")
    assert [record.sampled_ids for record in plain.records] == [r.sampled_ids for r in drifting.records]
    assert [member.reward for member in plain.members] == [member.reward for member in drifting.members]


def test_lengths_have_the_mean_of_the_preset() -> None:
    preset = PRESETS[SMALL]
    sampled = [len(record.sampled_ids) for group in range(8) for record in make_group(SMALL, group).records]
    assert len(sampled) == 8 * preset.members * preset.calls
    assert abs(np.mean(sampled) / preset.sampled - 1) < 0.1
    assert 0.4 < np.std(np.log(sampled)) < 0.6


def test_members_share_system_and_task_and_nothing_else() -> None:
    first = [member.records[0].prompt.new_ids for member in make_group(SMALL).members]
    assert len(set(first)) == 1
    assert len({member.records[0].sampled_ids for member in make_group(SMALL).members}) == len(first)
    other = make_group(SMALL, 1).members[0].records[0].prompt.new_ids
    assert other != first[0]
    assert other[:1000] == first[0][:1000]


def test_a_deep_agent_has_subagents_a_compaction_and_retries() -> None:
    records = make_group("deep-agent").members[0].records
    kinds = [record.kind for record in records if record.finish_reason]
    assert (kinds.count("agent"), kinds.count("subagent"), kinds.count("compaction")) == (60, 16, 1)
    assert any(record.finish_reason is None for record in make_group("deep-agent").records)
    assert causes("deep-agent") == {"subagent", "compaction"}


def test_drift_breaks_histories_for_the_causes_that_it_names() -> None:
    assert causes(SMALL) == set()
    assert causes("polar-swe-drift") == {"retokenized", "thinking_stripped"}
    drifting = make_group("deep-agent-drift")
    share = sum(
        split.cause == "retokenized"
        for each in stitch_group(drifting)
        for call in each.calls
        for split in call.splits
    ) / len(drifting.records)
    assert 0 < share < 2 * RETOKENISED
