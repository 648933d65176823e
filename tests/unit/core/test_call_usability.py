"""Every reason why a call is not trained, and which tokens are masked."""

import math
from typing import Any

import pytest

from polar.core.call_usability import bad_logprobs, media_parts
from polar.core.stitching import stitch
from schemas.calls import CallRecord, Delivery, Usage
from schemas.columns import FloatColumn
from tests.unit.core.call_records import SessionRecords

IMAGE = {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}


def reasons(session: SessionRecords) -> list[str | None]:
    return [call.untrainable for call in stitch(session.opened, session.records, session.sealed()).calls]


def one(prompt: list[int], sampled: list[int], **fields: Any) -> str | None:
    session = SessionRecords()
    session.call(prompt, sampled, **fields)
    return reasons(session)[0]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"untrainable": "constrained_sampling"}, "constrained_sampling"),
        ({"kind": "auxiliary"}, "auxiliary"),
        ({"delivery": Delivery.CLIENT_ABORTED}, "client_aborted"),
        ({"delivery": Delivery.UPSTREAM_ERROR}, "upstream_error"),
        ({"finish_reason": "abort"}, "finish_abort"),
        ({"finish_reason": "error"}, "finish_error"),
        ({"finish_reason": "content_filter"}, "finish_unknown"),
        ({"finish_reason": None}, "finish_unknown"),
        ({"finish_reason": "length"}, None),
        ({"usage": Usage(prompt_tokens=2, completion_tokens=3)}, "ids_incomplete"),
        ({"usage": Usage(prompt_tokens=1, completion_tokens=2)}, "ids_incomplete"),
        ({"usage": None}, None),
        ({"messages": [IMAGE]}, "media_missing"),
        ({"logprobs_mode": "raw_logprobs"}, "logprob_semantics"),
        ({"sampling_used": {"temperature": 0}}, "constrained_sampling"),
        ({"sampling_used": {"temperature": "hot"}}, "constrained_sampling"),
    ],
)
def test_reason_of_a_single_call(fields: dict[str, Any], reason: str | None) -> None:
    assert one([1, 2], [3, 4], **fields) == reason


def test_nothing_sampled_and_nothing_asked() -> None:
    assert one([1, 2], []) == "empty_completion"
    assert one([], [3]) == "empty_prompt"


def test_a_session_that_must_not_be_trained() -> None:
    session = SessionRecords()
    session.call([1], [2])
    session.opened = session.opened.model_copy(update={"trainable": False})
    assert reasons(session) == ["session_untrainable"]


def test_a_picture_in_the_history_marks_the_calls_that_keep_it() -> None:
    session = SessionRecords()
    session.call([1], [2], messages=[IMAGE])
    for kept in (1, 0):
        record = session.call([1, 2, 3], [4], base=1)
        delta = record.messages.model_copy(update={"base_call": 1, "kept": kept})
        session.records[-1] = record.model_copy(update={"messages": delta})
    assert reasons(session) == ["media_missing", "media_missing", None]
    assert not media_parts({"role": "user", "content": "text"})


def test_bad_logprobs_are_masked_one_by_one() -> None:
    values = [-0.5, math.nan, -math.inf, math.inf, 0.001, -9999.0, 0.0, -9998.0]
    assert bad_logprobs(FloatColumn(values)) == [1, 2, 3, 4, 5]
    session = SessionRecords()
    session.call([1], list(range(8)), logprobs=values)
    (call,) = stitch(session.opened, session.records, session.sealed()).calls
    assert call.untrainable is None
    assert call.masked.tolist() == [1, 2, 3, 4, 5]
    assert all(math.isnan(call.logprobs[index]) for index in call.masked)


def attempts(*calls: tuple[list[int], dict[str, Any]]) -> list[str | None]:
    session = SessionRecords()
    for sampled, fields in calls:
        session.call([1, 2], sampled, **({"request_digest": "r"} | fields))
    return reasons(session)


LOST = {"delivery": Delivery.CLIENT_ABORTED}


def test_equal_requests_after_a_delivered_answer_are_two_calls() -> None:
    assert attempts(([3], {}), ([4], {})) == [None, None]


def test_a_retry_of_a_lost_answer_is_one_call() -> None:
    assert attempts(([3], LOST), ([4], {})) == ["client_aborted", None]


def test_overlapping_attempts_are_one_call_and_the_last_counts() -> None:
    assert attempts(([3], {}), ([4], {"open_calls": (1,)})) == ["orphan_retry", None]


def test_the_attempt_that_is_continued_counts() -> None:
    session = SessionRecords()
    session.call([1, 2], [3], request_digest="r")
    session.call([1, 2], [4], request_digest="r", open_calls=(1,))
    session.call([1, 2, 3, 9], [5], base=1)
    assert reasons(session) == [None, "orphan_retry", None]


def test_a_lost_attempt_joins_what_comes_before_and_after_it() -> None:
    assert attempts(([3], {}), ([3], LOST | {"open_calls": (1,)}), ([4], {})) == [
        "orphan_retry",
        "client_aborted",
        None,
    ]


@pytest.mark.parametrize("other", [{"choice_index": 1}, {"thread_id": "sub"}, {"request_digest": "other"}])
def test_samples_threads_and_other_requests_are_no_retries(other: dict[str, Any]) -> None:
    assert attempts(([3], {}), ([4], {"open_calls": (1,)} | other)) == [None, None]


def test_duplicates_of_a_record_are_one_call() -> None:
    from polar.core.session_log import SessionLog

    session = SessionRecords()
    record: CallRecord = session.call([1], [2])
    log = SessionLog(session.opened)
    assert log.add(record)
    assert not log.add(record.model_copy(update={"engine_id": "other"}))
    assert len(log.close(session.sealed()).calls) == 1


def test_a_seal_that_announces_absurdly_many_calls_fills_no_memory() -> None:
    session = SessionRecords()
    session.call([1], [2])
    listed = stitch(session.opened, session.records, session.sealed(calls=10**9)).listed
    assert len(listed) == 10_001
    assert listed[-1].detail == f"and {10**9 - 1 - 10_000} more"
