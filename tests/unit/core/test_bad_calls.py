"""Whatever a record holds, the stitcher goes on: a reason on the call, or a dead letter."""

import math
from random import Random
from typing import Any

import pytest

from polar.core.prefix_tree import TreePaths
from polar.core.stitcher_stage import StitcherCore
from polar.core.stitching import stitch
from schemas.base import encode
from schemas.calls import CallRecord, MessagesDelta, PromptDelta
from schemas.codec import UnreadableRecordError, decode
from schemas.columns import FloatColumn, TokenColumn
from schemas.topics import CALLS
from schemas.trajectories import Trajectory, UsabilityRules
from schemas.trees import StitchedCall
from tests.unit.core.call_records import SessionRecords
from tests.unit.core.feed import Feed

VOCABULARY = UsabilityRules(vocabulary=100)


def through(session: SessionRecords, rules: UsabilityRules | None = None) -> Trajectory:
    """Written, read and stitched as in the service."""
    feed = Feed(StitcherCore(rules=rules), CALLS)
    events = [session.opened, *session.records, session.sealed()]
    written = [each for event in events for each in feed(decode(encode(event), CALLS))]
    assert feed.reasons() == []
    (trajectory,) = written
    assert isinstance(trajectory, Trajectory)
    decode(encode(trajectory), trajectory_topic())
    return trajectory


def trajectory_topic():
    from schemas.topics import TOPIC_OF

    return TOPIC_OF[Trajectory]


def alone(
    prompt: list[int], sampled: list[int], rules: UsabilityRules | None = None, **fields: Any
) -> StitchedCall:
    session = SessionRecords()
    session.call(prompt, sampled, **fields)
    (call,) = through(session, rules).calls
    return call


@pytest.mark.parametrize(
    ("prompt", "sampled", "reason"),
    [
        ([], [5], "empty_prompt"),
        ([1, 2], [], "empty_completion"),
        ([], [], "empty_completion"),
        ([1, 100], [5], "ids_invalid"),
        ([1, 2], [2**31 - 1], "ids_invalid"),
        ([1, -1], [5], "ids_invalid"),
        ([1, 2], [-(2**31)], "ids_invalid"),
        ([99], [0], None),
    ],
)
def test_ids_that_cannot_be_trained(prompt: list[int], sampled: list[int], reason: str | None) -> None:
    assert alone(prompt, sampled, VOCABULARY).untrainable == reason


def test_a_call_that_keeps_an_invalid_id_is_invalid_and_one_that_does_not_is_not() -> None:
    session = SessionRecords()
    session.call([1, -5, 2], [3])
    session.call([1, -5, 2, 3, 4], [6], base=1)
    session.call([1, 7], [6], base=1)
    session.call([1, 7, 8], [9, 500], base=3)
    session.call([1, 7, 8, 9, 4], [6], base=4)
    trajectory = through(session, VOCABULARY)
    assert [call.untrainable for call in trajectory.calls] == [
        "ids_invalid",
        "ids_invalid",
        None,
        "ids_invalid",
        None,
    ]
    paths = TreePaths(trajectory.tree)
    assert [paths.path(call.end_run, call.end_offset).tolist() for call in trajectory.calls] == [
        session.paths[seq] for seq in range(1, 6)
    ]
    assert [(split.against, split.index) for split in trajectory.calls[4].splits] == [(3, 2)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -9999.0, 0.5])
def test_one_bad_logprob_masks_one_token(value: float) -> None:
    call = alone([1], [2, 3, 4], logprobs=[-0.5, value, -0.25])
    assert (call.untrainable, call.masked.tolist()) == (None, [1])
    assert [math.isnan(each) for each in call.logprobs] == [False, True, False]


@pytest.mark.parametrize("temperature", [0, -1, math.nan, 10**400, "hot", None, True])
def test_temperatures(temperature: Any) -> None:
    call = alone([1], [2], sampling_used={"temperature": temperature})
    assert call.untrainable == (None if temperature is True else "constrained_sampling")
    assert math.isfinite(call.temperature)


@pytest.mark.parametrize(("base", "kept"), [(9, 1), (2, 1), (1, 5), (1, 10**30)])
def test_a_base_that_is_not_there_marks_the_call_and_those_on_it(base: int, kept: int) -> None:
    session = SessionRecords()
    session.call([1, 2], [3])
    session.call([1, 2, 3, 4], [5], base=1)
    record = session.records[-1]
    bad = PromptDelta(base_call=base, kept=kept, new_ids=TokenColumn([4]))
    session.records[-1] = record.model_copy(update={"prompt": bad})
    session.call([1, 2, 3, 4, 5, 6], [7], base=2)
    session.call([1, 2, 3, 8], [9], base=1)
    trajectory = through(session)
    assert [call.untrainable for call in trajectory.calls] == [None, "missing_base", "missing_base", None]
    assert [(call.end_run, call.sampled_tokens) for call in trajectory.calls[1:3]] == [(-1, 0), (-1, 0)]
    assert len(trajectory.tree.tokens) == 5


def test_columns_of_unequal_length_are_a_dead_letter() -> None:
    session = SessionRecords()
    record = session.call([1], [2, 3])
    uneven = record.model_copy(update={"logprobs": FloatColumn([-0.5])})
    with pytest.raises(UnreadableRecordError, match="sampled_ids and logprobs differ in length") as failed:
        decode(encode(uneven), CALLS)
    assert failed.value.reason == "invalid"


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": 7, "content": {"a": [1]}},
        {"role": "user", "content": [None, 5, "x", {"type": 9}]},
        {"role": "assistant", "tool_calls": [None, {"function": 3}, {"function": {"arguments": "{"}}]},
        {"role": "assistant", "tool_calls": "no"},
        {"role": "user", "content": "\ud800"},
    ],
)
def test_messages_of_any_shape(message: dict[str, Any]) -> None:
    session = SessionRecords()
    asked = {"role": "user", "content": "Go"}
    session.call([1], [2, 3], messages=[asked], answer=message)
    session.call(
        [1, 5], [3], messages=[asked, {**message, "name": "n"}, asked], answer=message, tools=[message]
    )
    session.call([1, 6], [3], messages=[message], kind="agent")
    assert len(through(session).calls) == 3


def test_messages_nested_without_end() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    session = SessionRecords()
    for token in (2, 3):
        record = session.call([1, token], [4])
        held = MessagesDelta.model_construct(
            base_call=None, kept=0, new=({"role": "user", "content": deep},), digest=""
        )
        session.records[-1] = record.model_copy(update={"messages": held})
    causes = [
        split.cause
        for call in stitch(session.opened, session.records, session.sealed()).calls
        for split in call.splits
    ]
    assert causes == ["retokenized"]


def record(like: CallRecord, seq: int, prompt: PromptDelta, sampled: list[int]) -> CallRecord:
    return like.model_copy(
        update={
            "seq": seq,
            "call_id": f"{like.session_id}#{seq}",
            "request_digest": str(seq),
            "prompt": prompt,
            "sampled_ids": TokenColumn(sampled),
            "logprobs": FloatColumn([-0.5] * len(sampled)),
            "usage": None,
        }
    )


def test_ten_thousand_branches() -> None:
    random, session = Random(0), SessionRecords()
    like = session.call([1], [2])
    records = [record(like, 1, PromptDelta(new_ids=TokenColumn(range(1000))), [7])]
    for seq in range(2, 10_001):
        kept = random.randint(1, 1000)
        delta = PromptDelta(base_call=1, kept=kept, new_ids=TokenColumn([5000 + seq]))
        records.append(record(like, seq, delta, [seq, 7]))
    trajectory = stitch(session.opened, records, session.sealed(calls=10_000))
    assert {call.untrainable for call in trajectory.calls} == {None}
    assert len(trajectory.tree.tokens) == 1001 + 3 * 9_999
    assert {split.against for call in trajectory.calls for split in call.splits} >= {1, 2}
    paths = TreePaths(trajectory.tree)
    for call, each in zip(trajectory.calls[1:], records[1:], strict=True):
        assert [split.index for split in call.splits] == [each.prompt.kept]
        assert paths.depth(call.end_run, call.end_offset) == each.prompt.kept + 3


def test_a_session_of_a_million_tokens() -> None:
    random, session = Random(0), SessionRecords()
    like = session.call([1], [2])
    prompt = PromptDelta(new_ids=TokenColumn(random.choices(range(150_000), k=2000)))
    records = [record(like, 1, prompt, random.choices(range(150_000), k=2000))]
    for seq in range(2, 251):
        delta = PromptDelta(
            base_call=seq - 1,
            kept=4000 * (seq - 1),
            new_ids=TokenColumn(random.choices(range(150_000), k=2000)),
        )
        records.append(record(like, seq, delta, random.choices(range(150_000), k=2000)))
    trajectory = stitch(session.opened, records, session.sealed(calls=250))
    assert len(trajectory.tree.tokens) == 1_000_000
    assert len(trajectory.tree.parents) == 1
    assert [call.extends for call in trajectory.calls] == [None, *range(1, 250)]
    last = trajectory.calls[-1]
    path = TreePaths(trajectory.tree).path(last.end_run, last.end_offset)
    assert path[-2000:].tolist() == records[-1].sampled_ids.tolist()
