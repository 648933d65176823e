"""What must hold of every run: a record per call, the engine's ids in it, no key anywhere."""

from schemas.base import encode
from schemas.calls import CallRecord, Delivery
from tests.harness.scripted_engine import EngineCall, logprob
from tests.harness.stage import Performance


def prompts_of(records: list[CallRecord]) -> dict[int, list[int]]:
    """seq → prompt ids, put together from the records' deltas."""
    whole: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    for record in records:
        base = [] if record.prompt.base_call is None else whole[record.prompt.base_call]
        prompts[record.seq] = base[: record.prompt.kept] + record.prompt.new_ids.tolist()
        whole[record.seq] = prompts[record.seq] + record.sampled_ids.tolist()
    return prompts


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
    prompts = prompts_of(performance.records)
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


def assert_no_key(performance: Performance, logged: str) -> None:
    """The session's key stands in no output, log line or record."""
    mac = performance.secret.rpartition(".")[2]
    assert mac not in performance.finished.output
    assert mac not in logged
    for record in performance.records:
        assert mac.encode() not in encode(record)
