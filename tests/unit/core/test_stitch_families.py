"""Families of histories that harnesses make, each as a small session of its own.

Every test goes through both builders: `trained` is what a trainer would see, so that a branch
that were dropped, trained twice or put under another prefix is found here.
"""

from typing import Any

import pytest

from polar.core.packing import pack
from polar.core.stitching import stitch
from schemas.calls import Delivery
from schemas.trajectories import Trajectory
from tests.unit.core.call_records import SessionRecords
from tests.unit.core.occurrences import live_group, trained_in

SYSTEM, ASK, MORE = 10, 20, 21
END = 9

Trained = list[tuple[tuple[int, ...], int]]
"""(prefix, token), sorted."""


def whole(session: SessionRecords) -> Trajectory:
    """Stitched, and checked: each usable token is trained once under its own prompt, by both builders."""
    trajectory = stitch(session.opened, session.records, session.sealed())
    expected: Trained = sorted(
        ((*session.prompts[call.seq], *sampled[:at]), token)
        for call, record in zip(trajectory.calls, session.records, strict=True)
        if call.untrainable is None
        for sampled in [record.sampled_ids.tolist()]
        for at, token in enumerate(sampled)
    )
    for builder in ("per_request", "prefix_merging"):
        packed = pack([live_group(trajectory)], builder=builder, row_tokens=256, policy="p", batch_number=0)
        found = [
            (prefix, token)
            for (_, _, prefix, token, _), times in trained_in(packed.rows).items()
            for _ in range(times)
        ]
        assert sorted(found) == expected
    return trajectory


def extends(trajectory: Trajectory) -> list[int | None]:
    return [call.extends for call in trajectory.calls]


def breaks(trajectory: Trajectory) -> dict[int, tuple[int, int]]:
    """Call → (against, index)."""
    return {call.seq: (each.against, each.index) for call in trajectory.calls for each in call.splits}


def leaves(trajectory: Trajectory) -> int:
    parents = trajectory.tree.parents.tolist()
    return len(set(range(len(parents))) - set(parents))


def test_a_history_that_is_edited_once_and_then_restored_goes_back_to_its_branch() -> None:
    session = SessionRecords()
    session.call([SYSTEM, ASK], [1, 2, END])
    session.call([SYSTEM, ASK, 7, 7, MORE], [3, END])
    session.call([SYSTEM, ASK, 1, 2, END, MORE, ASK], [4, END])
    trajectory = whole(session)
    assert extends(trajectory) == [None, None, 1]
    assert breaks(trajectory) == {2: (1, 2)}
    assert leaves(trajectory) == 2


def test_a_later_answer_that_ends_inside_an_earlier_prompt_is_not_what_that_prompt_extends() -> None:
    session = SessionRecords()
    session.call([SYSTEM, 1, 2, MORE], [3])
    session.call([SYSTEM], [1])
    session.call([SYSTEM, 1, 2, MORE, 3, ASK], [4], base=1)
    session.call([SYSTEM, 1, 2, ASK], [5], base=1)
    trajectory = whole(session)
    assert extends(trajectory) == [None, None, 1, 2]
    assert breaks(trajectory) == {2: (1, 1), 4: (3, 3)}


def test_of_equally_near_calls_a_split_names_the_latest() -> None:
    session = SessionRecords()
    for number in range(5):
        session.call([SYSTEM, 30 + number], [1, END])
    session.call([SYSTEM, 31, 1, 7], [2, END])
    trajectory = whole(session)
    assert breaks(trajectory) == {2: (1, 1), 3: (2, 1), 4: (3, 1), 5: (4, 1), 6: (2, 3)}


def test_sampled_ids_under_another_prefix_are_context_there() -> None:
    """The suffix [2, 3] of the first answer stands at the same offset behind another id."""
    session = SessionRecords()
    session.call([SYSTEM], [1, 2, 3])
    session.call([SYSTEM, 5, 2, 3, MORE], [4])
    trajectory = whole(session)
    assert (extends(trajectory), breaks(trajectory)) == ([None, None], {2: (1, 1)})


@pytest.mark.parametrize("tool_result", [[END, END], [SYSTEM, ASK, END], [1, END, 1, END]])
def test_turn_markers_inside_an_observation_are_no_turn_ends(tool_result: list[int]) -> None:
    session = SessionRecords()
    session.call([SYSTEM, ASK], [1, END])
    session.call([SYSTEM, ASK, 1, END, *tool_result, MORE], [2, END], base=1)
    session.call([SYSTEM, ASK, 1, END, *tool_result, MORE, 2, END, ASK], [3, END], base=2)
    trajectory = whole(session)
    assert (extends(trajectory), leaves(trajectory)) == ([None, 1, 2], 1)


def test_an_answer_cut_by_length_in_the_middle_of_a_marker_is_extended_as_it_is() -> None:
    session = SessionRecords()
    session.call([SYSTEM], [1, END, SYSTEM, END], finish_reason="length")
    session.call([SYSTEM, 1, END, SYSTEM, END, MORE], [2, END], base=1)
    trajectory = whole(session)
    assert (extends(trajectory), breaks(trajectory)) == ([None, 1], {})


def test_a_template_without_separator_and_an_answer_of_one_token() -> None:
    session = SessionRecords()
    session.call([SYSTEM], [END])
    session.call([SYSTEM, END, MORE], [END], base=1)
    assert (extends(whole(session)), leaves(whole(session))) == ([None, 1], 1)


def test_a_doubled_first_token_in_every_call_is_what_the_engine_saw() -> None:
    session = SessionRecords()
    session.call([1, 1, SYSTEM], [2, END])
    session.call([1, 1, SYSTEM, 2, END, MORE], [3, END], base=1)
    assert breaks(whole(session)) == {}


def test_each_answer_drifts_and_every_call_keeps_its_own_ids() -> None:
    session = SessionRecords()
    history = [SYSTEM, ASK]
    for number in range(4):
        session.call(history, [3, 3, END], base=number or None)
        history = [*history, 4, END, MORE]
    trajectory = whole(session)
    assert extends(trajectory) == [None] * 4
    assert breaks(trajectory) == {2: (1, 2), 3: (2, 5), 4: (3, 8)}
    assert leaves(trajectory) == 4


def test_subagents_between_the_turns_a_summary_and_the_restart_are_branches() -> None:
    session = SessionRecords()
    session.call([SYSTEM, ASK], [1, END])
    session.call([30, 31], [5, END], thread_id="sub", kind="subagent")
    session.call([SYSTEM, ASK, 1, END, 40], [2, END], base=1)
    session.call([30, 31, 5, END, 32], [6, END], base=2, thread_id="sub", kind="subagent")
    session.call([SYSTEM, ASK, 1, END, 40, 2, END, 50], [7, END], base=3, kind="compaction")
    session.call([SYSTEM, 7, END, MORE], [8, END], base=1)
    trajectory = whole(session)
    assert extends(trajectory) == [None, None, 1, 2, 3, None]
    causes = {call.seq: each.cause for call in trajectory.calls for each in call.splits}
    assert causes == {2: "subagent", 6: "compaction"}
    assert leaves(trajectory) == 3


def test_several_samples_of_one_request_are_no_retries_and_equal_ones_train_twice() -> None:
    session = SessionRecords()
    for choice, sampled in enumerate(([1, END], [2, END], [1, END])):
        session.call([SYSTEM, ASK], sampled, choice_index=choice, request_digest="r")
    trajectory = whole(session)
    assert [call.untrainable for call in trajectory.calls] == [None] * 3
    assert len(trajectory.tree.tokens) == 6


def test_an_answer_that_was_thrown_away_and_sampled_again_trains_under_both_logprobs() -> None:
    session = SessionRecords()
    session.call([SYSTEM], [1, 2], finish_reason="length", request_digest="short")
    session.call([SYSTEM], [1, 2, 3, END], request_digest="long", base=1)
    trajectory = whole(session)
    assert breaks(trajectory) == {2: (1, 1)}
    assert trajectory.calls[1].splits[0].cause == "retry"
    assert leaves(trajectory) == 1


@pytest.mark.parametrize(
    ("lost", "reasons"),
    [
        ({"delivery": Delivery.CLIENT_ABORTED}, ["client_aborted", None]),
        ({"delivery": Delivery.UPSTREAM_ERROR, "finish_reason": None}, ["upstream_error", None]),
    ],
)
def test_a_lost_answer_is_kept_in_the_tree_and_only_its_retry_is_trained(
    lost: dict[str, Any], reasons: list[str | None]
) -> None:
    session = SessionRecords()
    session.call([SYSTEM], [1, 2], request_digest="r", **lost)
    session.call([SYSTEM], [3, END], request_digest="r")
    session.call([SYSTEM, 3, END, MORE], [4, END], base=2)
    trajectory = whole(session)
    assert [call.untrainable for call in trajectory.calls] == [*reasons, None]
    assert (extends(trajectory), breaks(trajectory)) == ([None, None, 2], {})
    assert len(trajectory.tree.tokens) == 8


def test_two_sessions_with_equal_ids_are_two_trees() -> None:
    first, second = SessionRecords("t/0/0/1"), SessionRecords("t/1/0/1")
    for session in (first, second):
        session.call([SYSTEM, ASK], [1, END])
    one, other = whole(first), whole(second)
    assert one.tree == other.tree
    assert {call.call_id for call in one.calls} & {call.call_id for call in other.calls} == set()
    packed = pack(
        [live_group(one, other)], builder="prefix_merging", row_tokens=64, policy="p", batch_number=0
    )
    assert packed.trained_tokens == 4
    assert packed.metrics["unique_tokens"] == 4
