"""The given stitch cases, through records, trajectory, group and all row builders."""

import math
from collections import Counter
from typing import Any

import pytest

from polar.core.drift import Decode
from polar.core.packing import pack
from polar.core.prefix_tree import PrefixTree, TreePaths
from polar.core.stitching import stitch
from schemas.batches import Builder
from schemas.calls import Delivery, MediaPart, Usage
from schemas.columns import FloatColumn
from schemas.trajectories import Trajectory, UsabilityRules
from tests.unit.core.call_records import SessionRecords, common, interval
from tests.unit.core.given_cases import Case, cases, number
from tests.unit.core.occurrences import live_group, trained_in

CASES = cases("stitch")


def _in_flight(call: dict[str, Any], calls: list[dict[str, Any]]) -> tuple[int, ...]:
    return tuple(
        other["seq"]
        for other in calls
        if other["session_id"] == call["session_id"] and other["t_start"] < call["t_start"] < other["t_end"]
    )


def _media(call: dict[str, Any], kept: int) -> tuple[MediaPart, ...]:
    """The parts among the new ids; a reference is named by its digest."""
    return tuple(
        MediaPart(position=part["position"], digest=(part["ref"] or {}).get("sha256"))
        for part in call.get("media") or ()
        if part["position"] >= kept
    )


def _sessions(case: Case, *, delta: bool) -> dict[str, SessionRecords]:
    calls = case["given"]["calls"]
    sessions: dict[str, SessionRecords] = {}
    for call in sorted(calls, key=lambda call: (call["session_id"], call["seq"])):
        session = sessions.setdefault(call["session_id"], SessionRecords(call["session_id"], "t"))
        sampled = call["completion_ids"]
        logprobs = [number(value) for value in call["logprobs"]]
        is_short = len(logprobs) != len(sampled)
        previous = max(session.paths, default=None)
        base = previous if delta else None
        kept = common(call["prompt_ids"], session.paths[base]) if base is not None else 0
        session.call(
            call["prompt_ids"],
            sampled,
            base=base,
            media=_media(call, kept),
            seq=call["seq"],
            logprobs=(logprobs + [math.nan] * len(sampled))[: len(sampled)],
            untrainable="ids_incomplete" if is_short else None,  # what a gateway records then
            thread_id=call["thread_id"],
            kind=call["kind"],
            request_digest=call["request_key"],
            choice_index=call["choice_index"],
            open_calls=_in_flight(call, calls),
            messages=call["messages"] or (),
            tools=call["tools"] or (),
            answer=call["response_message"] or {},
            usage=Usage(**call["usage"]) if call["usage"] else None,
            finish_reason=call["finish_reason"],
            policy=interval(call["policy_version_min"], call["policy_version_max"]),
            delivery=Delivery(call["delivery"]),
            sampling_used={"temperature": call["sampling"]["temperature"]},
        )
    return sessions


def _trajectories(case: Case, *, delta: bool, decode: Decode | None = None) -> list[Trajectory]:
    config = case["given"]["config"]
    rules = UsabilityRules(train_kinds=tuple(config["train_kinds"]), trains_media=True)
    return [
        stitch(session.opened, session.records, session.sealed(), rules, decode)
        for session in _sessions(case, delta=delta).values()
    ]


def _labels(case: Case) -> dict[str, str]:
    return {f"{call['session_id']}#{call['seq']}": call["call"] for call in case["given"]["calls"]}


@pytest.mark.parametrize("delta", [False, True], ids=["whole", "delta"])
@pytest.mark.parametrize("builder", ["per_request", "prefix_merging", "prefix_tree"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_trained(case: Case, builder: Builder, delta: bool) -> None:
    given, expect = case["given"], case["expect"]
    row_tokens = given["config"].get("max_row_tokens", 4096)
    groups = [live_group(each, group_id=each.session_id) for each in _trajectories(case, delta=delta)]
    packed = pack(groups, builder=builder, row_tokens=row_tokens, policy="policy", batch_number=0)
    expected: Counter[tuple[tuple[int, ...], int, float]] = Counter()
    for entry in expect["trained"]:
        context, ids = entry["context_ids"], entry["trained_ids"]
        for at, (target, logprob) in enumerate(
            zip(ids, FloatColumn(map(number, entry["logprobs"])), strict=True)
        ):
            if math.isfinite(logprob):
                expected[(*context, *ids[:at]), target, logprob] += 1
    masked = {(entry["call"], entry["index"]) for entry in expect["masked"]}
    labels = _labels(case)
    found: Counter[tuple[tuple[int, ...], int, float]] = Counter()
    for (call_id, index, prefix, target, logprob), times in trained_in(packed.rows).items():
        assert (labels[call_id], index) not in masked
        found[prefix, target, logprob] += times
    assert found == expected
    assert packed.trained_tokens == expect["trained_tokens"] == sum(expected.values())
    assert all(len(row.tokens) <= row_tokens for row in packed.rows)
    if builder == "prefix_tree" and row_tokens == 4096:
        assert packed.metrics["repeated_ancestor_tokens"] == 0
    if builder != "per_request":
        assert sum(len(row.segment_starts) - 1 for row in packed.rows) <= expect["leaves"]
        assert len(packed.rows) <= expect.get("max_rows", len(packed.rows))
        assert packed.metrics["unique_tokens"] <= expect["trie_tokens"]
    assert len(packed.truncated) == expect.get("truncated_rows", len(packed.truncated))


@pytest.mark.parametrize("case", CASES)
def test_what_is_listed(case: Case) -> None:
    expect, labels = case["expect"], _labels(case)
    trajectories = _trajectories(case, delta=True)
    calls = {labels[call.call_id]: call for each in trajectories for call in each.calls}
    reasons = {entry["call"]: {entry["reason"], *entry.get("or", ())} for entry in expect["untrainable"]}
    for label, call in calls.items():
        if label in reasons:
            assert call.untrainable in reasons[label]
        else:
            assert call.untrainable is None
    masked = {
        (label, index) for label, call in calls.items() if not call.untrainable for index in call.masked
    }
    assert masked == {(entry["call"], entry["index"]) for entry in expect["masked"]}
    usable = PrefixTree()
    leaves = tokens = 0
    for each in trajectories:
        usable, paths = PrefixTree(), TreePaths(each.tree)
        for call in each.calls:
            if call.untrainable is None:
                usable.insert(paths.path(call.end_run, call.end_offset))
        tree = usable.export().tree
        leaves += len(set(range(len(tree.parents))) - set(tree.parents))
        tokens += len(tree.tokens)
    assert (leaves, tokens) == (expect["leaves"], expect["trie_tokens"])


def _decode(case: Case) -> Decode | None:
    vocabulary = case["given"].get("vocab")
    if vocabulary is None:
        return None
    return lambda ids: "".join(vocabulary.get(str(each), "") for each in ids)


@pytest.mark.parametrize("is_decoded", [False, True], ids=["ids", "texts"])
@pytest.mark.parametrize("case", CASES)
def test_where_and_why_the_history_breaks(case: Case, is_decoded: bool) -> None:
    expect, labels = case["expect"], _labels(case)
    decode = _decode(case) if is_decoded else None
    found: dict[str, tuple[str, int, str]] = {}
    extends: dict[str, str | None] = {}
    for trajectory in _trajectories(case, delta=False, decode=decode):
        by_seq = {call.seq: labels[call.call_id] for call in trajectory.calls}
        for call in trajectory.calls:
            if call.untrainable is None:
                extends[by_seq[call.seq]] = None if call.extends is None else by_seq[call.extends]
            for split in call.splits:
                found[by_seq[call.seq]] = by_seq[split.against], split.index, split.cause
                assert bool(split.held_text or split.found_text) == (decode is not None)
    assert extends == expect["extends"]
    optional = set(expect.get("split_optional", ()))
    listed = {entry["call"] for entry in expect["splits"]}
    for entry in expect["splits"]:
        if entry["call"] not in found and entry["call"] in optional:
            continue
        against, index, cause = found[entry["call"]]
        assert (against, index) == (entry["against"], entry["index"])
        assert cause in {entry["cause"], *entry.get("or", ())}
    assert all(extends[label] is not None for label in set(found) - listed)
