"""What must hold of every run: a record per call, the engine's ids in it, no key anywhere."""

from itertools import pairwise

from schemas.base import encode
from schemas.calls import CallRecord, Delivery
from tests.harness.scripted_engine import EngineCall, logprob
from tests.harness.stage import Performance
from tests.record_prompts import whole_prompts

CONTINUED = {"extended", "drifted", "arguments_reserialized"}
"""Relations of a call to the one that it continues with all of its ids."""


def matched(performance: Performance) -> list[tuple[EngineCall, CallRecord]]:
    """Each engine call with its record, in order of seq; fails when one has none."""
    calls = {call.name: call for call in performance.calls}
    assert len(calls) == len(performance.calls), "the engine was asked twice under one number"
    names = [record.call_id for record in performance.records]
    assert sorted(names) == sorted(calls), "calls and records differ"
    assert [record.seq for record in performance.records] == list(range(1, len(names) + 1))
    assert performance.sealed_calls == len(names)
    return [(calls[record.call_id], record) for record in performance.records]


def assert_recorded(performance: Performance, dialect: str) -> list[tuple[EngineCall, CallRecord]]:
    """A record per call, with the ids and log-probs that the engine gave."""
    pairs = matched(performance)
    prompts = whole_prompts(performance.records)
    for call, record in pairs:
        assert record.dialect == dialect
        assert record.logprobs.tolist() == [logprob(token) for token in record.sampled_ids]
        if call.is_whole:
            assert record.delivery is Delivery.DELIVERED, record.error
            assert prompts[record.seq] == call.prompt_ids
            assert record.sampled_ids.tolist() == call.sampled_ids
            assert record.untrainable is None
            assert record.usage is not None
            assert record.usage.prompt_tokens == len(call.prompt_ids)
        else:
            assert record.delivery is Delivery.UPSTREAM_ERROR
            assert record.sampled_ids.tolist() == call.sampled_ids[: len(record.sampled_ids)]
    return pairs


def assert_continued(pairs: list[tuple[EngineCall, CallRecord]]) -> list[str]:
    """Every prompt that continues a call begins with the ids of that call, and was sent as ids.

    Returns how each call stands to those before it; none of them may be unexplained.
    """
    calls = {record.seq: (call, record) for call, record in pairs}
    relations = []
    for call, record in pairs:
        continuity = record.continuity
        assert continuity is not None
        assert call.were_ids_sent is (continuity.rendering != "engine"), continuity
        relations.append(str(continuity.relation))
        if continuity.parent is not None:
            earlier, earlier_record = calls[continuity.parent]
            sampled = earlier_record.sampled_ids.tolist()
            path = earlier.prompt_ids + sampled[: len(sampled) - continuity.cut_tokens]
            assert call.prompt_ids[: len(path)] == path
    assert "unknown" not in relations
    return relations


def assert_chain(pairs: list[tuple[EngineCall, CallRecord]]) -> None:
    """Each of these calls continues the one before it: its prompt begins with all of that call's ids."""
    for (earlier, record), (later, later_record) in pairwise(pairs):
        path = earlier.prompt_ids + earlier.sampled_ids
        assert later.prompt_ids[: len(path)] == path
        assert later_record.continuity is not None
        assert later_record.continuity.rendering == "spliced"
        assert later_record.continuity.parent == record.seq


def assert_no_key(performance: Performance, logged: str) -> None:
    """The session's key stands in no output, log line or record."""
    mac = performance.secret.rpartition(".")[2]
    assert mac not in performance.finished.output
    assert mac not in logged
    for record in performance.records:
        assert mac.encode() not in encode(record)
