"""The builders to compare with do what their descriptions say, faults included."""

import pytest

from bench.reference_builders import Coverage, expand, judge, per_request, polar_merging
from bench.workloads import SessionLoad, make_group
from tests.unit.core.call_records import SessionRecords

END = 9


def member(*calls: tuple[list[int], list[int]], **fields: object) -> SessionLoad:
    session = SessionRecords()
    for prompt, sampled in calls:
        session.call(prompt, sampled, base=max(session.paths, default=None), **fields)
    return SessionLoad(session.opened, session.records, session.sealed(), 1.0)


def test_a_growing_history_is_one_trace_and_faithful() -> None:
    load = member(([1, 2], [3, END]), ([1, 2, 3, END, 4], [5, END]))
    (trace,) = polar_merging(load)
    assert trace.tokens.tolist() == [1, 2, 3, END, 4, 5, END]
    assert judge([trace], load) == Coverage(computed=7, sampled=4, faithful=4, unfaithful=0, dropped=0)


def test_an_answer_that_comes_back_changed_is_merged_unseen() -> None:
    load = member(([1, 2], [3, 3, END]), ([1, 2, 7, END, 4], [5, END]))
    (trace,) = polar_merging(load)
    assert trace.tokens.tolist() == [1, 2, 3, 3, END, 4, 5, END]
    assert judge([trace], load) == Coverage(computed=8, sampled=5, faithful=3, unfaithful=2, dropped=0)


def test_a_chain_ends_where_no_end_of_turn_is_found_and_the_rest_is_dropped() -> None:
    load = member(([1], [3, END]), ([1, 3, 4], [5, END]), ([1, 3, 4, 5, END, 6], [7, END]))
    (trace,) = polar_merging(load)
    assert trace.tokens.tolist() == [1, 3, END]
    assert judge([trace], load).dropped == 4


def test_a_prompt_that_extends_no_last_prompt_opens_a_chain() -> None:
    load = member(([1, 2], [3, END]), ([1, 5], [6, END]), ([1, 2, 3, END, 4], [7, END]))
    assert [[span.seq for span in trace.spans] for trace in polar_merging(load)] == [[1, 3], [2]]


@pytest.mark.parametrize("preset", ["deep-agent", "deep-agent-drift"])
def test_one_trace_a_call_is_always_faithful(preset: str) -> None:
    load = make_group(preset).members[0]
    coverage = judge(per_request(load), load)
    assert coverage.faithful == coverage.sampled > 0
    assert coverage.computed == sum(len(call.prompt) + len(call.sampled) for call in expand(load).values())


def test_merging_is_lossless_on_plain_histories_and_not_on_drifting_ones() -> None:
    plain, drifting = make_group("polar-swe").members, make_group("deep-agent-drift").members
    assert all(judge(polar_merging(each), each).dropped == 0 for each in plain)
    assert any(judge(polar_merging(each), each).unfaithful for each in drifting)
