"""The demo's ledgers: a pure comparison of the log with what independent witnesses kept.

| figure | compares |
|---|---|
| calls_lost, calls_double | the agents' journal with the CallRecords |
| engine_requests_unexplained | the relay's raw answers with the CallRecords |
| unfaithful_tokens | every trained position of the packed rows with the raw answers' ids |
"""

import hashlib
import struct
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from polar.core.row_reading import RowBranches, ints
from polar.demo.recorded import Recorded
from polar.demo.witness import Answer, JournalEntry
from schemas.batches import PackedRow
from schemas.calls import CallRecord, Delivery


@dataclass(frozen=True, slots=True)
class Account:
    """What was compared and what was found wrong, by id."""

    calls_lost: tuple[str, ...]
    """Response ids of journalled answers that no CallRecord holds."""
    calls_double: tuple[str, ...]
    """Response ids of journalled answers that count as more than one call."""
    calls_redelivered: int
    """Records written again under the same call id: stages drop them, nothing counts twice."""
    unexplained: tuple[str, ...]
    """Raw answers (response id or number) that nothing accounts for."""
    interrupted: tuple[str, ...]
    """Raw answers without a CallRecord that broke off, or whose asker did not take the end."""
    unfaithful_tokens: int
    trained_tokens: int
    trained_twice: int
    """Trained positions whose (call, index) was trained before."""


def audit(run: Recorded, answers: Sequence[Answer], journal: Sequence[JournalEntry]) -> Account:
    """Compare. Pure; answers and journal come from polar.demo.witness."""
    calls_of: dict[str, set[str]] = defaultdict(set)
    choices_of: dict[str, set[int]] = defaultdict(set)
    """Choices of one answer are calls of their own."""
    recorded: set[tuple[str, str, str]] = set()
    for call in run.calls:
        if call.engine_request_id:
            calls_of[call.engine_request_id].add(call.call_id)
            choices_of[call.engine_request_id].add(call.choice_index)
            recorded.add((call.session_id, call.engine_request_id, _content_sha256(call)))
    received = dict.fromkeys(journal)
    lost = tuple(
        entry.response_id
        for entry in received
        if (entry.session, entry.response_id, entry.content_sha256) not in recorded
    )
    double = tuple(
        entry.response_id
        for entry in received
        if len(calls_of[entry.response_id]) > len(choices_of[entry.response_id])
    )
    unexplained, interrupted = _classify(run, answers, calls_of)
    faithful = _check_rows(run, answers)
    return Account(
        calls_lost=lost,
        calls_double=double,
        calls_redelivered=len(run.calls) - len(run.distinct_calls),
        unexplained=unexplained,
        interrupted=interrupted,
        unfaithful_tokens=faithful[0],
        trained_tokens=faithful[1],
        trained_twice=faithful[2],
    )


def _content_sha256(call: CallRecord) -> str:
    return hashlib.sha256(str(call.answer.get("content") or "").encode()).hexdigest()


def _classify(
    run: Recorded, answers: Sequence[Answer], calls_of: Mapping[str, set[str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(unexplained, interrupted) names of raw answers."""
    failed = {call.call_id for call in run.distinct_calls.values() if call.delivery is not Delivery.DELIVERED}
    unexplained, interrupted = [], []
    for answer in answers:
        if answer.purpose in {"probe", "canary"} or calls_of.get(answer.response_id):
            continue
        name = answer.response_id or f"answer {answer.number}"
        if answer.call in failed:
            continue  # listed on the log as aborted, refused, or in flight when its gateway died
        if not answer.complete or not answer.forwarded:
            interrupted.append(name)
        else:
            unexplained.append(name)
    return tuple(unexplained), tuple(interrupted)


def _check_rows(run: Recorded, answers: Sequence[Answer]) -> tuple[int, int, int]:
    """(unfaithful, trained, trained twice) over all rows of batches."""
    raw = {answer.response_id: answer for answer in answers if answer.response_id}
    calls = run.distinct_calls
    seen: set[tuple[str, int]] = set()
    unfaithful = trained = twice = 0
    for row in run.rows:
        raw_of = {call_id: raw.get(_response(calls, call_id)) for call_id in row.call_ids}
        for call_id, index, is_right in _row_positions(row, raw_of):
            trained += 1
            unfaithful += not is_right
            twice += (call_id, index) in seen
            seen.add((call_id, index))
    return unfaithful, trained, twice


def _response(calls: Mapping[str, CallRecord], call_id: str) -> str:
    call = calls.get(call_id)
    return call.engine_request_id if call is not None else ""


def _row_positions(row: PackedRow, raw: Mapping[str, Answer | None]) -> list[tuple[str, int, bool]]:
    """(call id, index, whether the engine sampled this token under exactly this prefix)."""
    branches = RowBranches.of(row)
    tokens = ints(row.tokens)
    segments = branches.segment_of(ints(row.sources)).tolist()
    ends = branches.starts.tolist()[1:]
    paths = {segment: tuple(tokens[branches.path(segment)].tolist()) for segment in set(segments)}
    columns = zip(
        segments,
        row.sources,
        row.targets,
        row.engine_logprobs,
        row.call_ordinals,
        row.call_indexes,
        strict=True,
    )
    found = []
    for segment, source, target, logprob, ordinal, index in columns:
        call_id = row.call_ids[ordinal]
        answer = raw[call_id]
        found.append(
            (
                call_id,
                index,
                answer is not None
                and index < len(answer.token_ids)
                and answer.token_ids[index] == target
                and paths[segment][: source + 1 + len(paths[segment]) - ends[segment]]
                == answer.prompt_ids + answer.token_ids[:index]
                and _float32(answer.logprobs[index]) == logprob,
            )
        )
    return found


def _float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def summarize(run: Recorded, account: Account, *, seconds: float) -> dict[str, float | int | bool]:
    """The demo's JSON summary."""
    rewards = [batch.mean_reward for batch in run.manifests if batch.mean_reward is not None]
    quarter = max(1, len(rewards) // 4)
    published = [policy for policy in run.policies if policy.parent is not None or policy.batch_number >= 0]
    steps = {policy.batch_number for policy in run.policies if policy.batch_number >= 0}
    loaded = {str(state.version) for state in run.engines if state.status == "ready" and state.version}
    gaps = [policy.metrics for policy in published if policy.metrics.get("gap_tokens", 0) > 0]
    depths = depths_while_running(run)
    first = run.manifests[0].trained_tokens if run.manifests else 0
    return {
        "sessions": len({opened.session_id for opened in run.opened}),
        "calls": len(run.distinct_calls),
        "calls_lost": len(account.calls_lost),
        "calls_double": len(account.calls_double),
        "calls_redelivered": account.calls_redelivered,
        "trained_tokens": account.trained_tokens,
        "trained_twice": account.trained_twice,
        "unfaithful_tokens": account.unfaithful_tokens,
        "steps": len(steps),
        "policies_published": len({str(policy.version) for policy in run.policies}),
        "policies_loaded": len(loaded),
        "reward_first_quarter": round(fmean(rewards[:quarter]), 4) if rewards else 0.0,
        "reward_last_quarter": round(fmean(rewards[-quarter:]), 4) if rewards else 0.0,
        "max_logprob_gap": max((metrics["max_logprob_gap"] for metrics in gaps), default=0.0),
        "first_batch_tokens": first,
        "gap_tokens": int(sum(metrics["gap_tokens"] for metrics in gaps)),
        "engine_requests_unexplained": len(account.unexplained),
        "engine_requests_interrupted": len(account.interrupted),
        "ready_depth_p50": float(median(depths)) if depths else 0.0,
        "seconds": round(seconds, 1),
    }


def depths_while_running(run: Recorded) -> list[int]:
    """READY depth in the heartbeats from the first to the last one with a busy node."""
    busy = [
        index
        for index, beat in enumerate(run.heartbeats)
        if beat.counts.running or beat.counts.postrun or beat.counts.initializing
    ]
    if not busy:
        return []
    return [beat.counts.ready for beat in run.heartbeats[busy[0] : busy[-1] + 1]]


def tokens_by_kind(run: Recorded) -> list[Counter[str]]:
    """Per batch: trained tokens, other tokens of its rows (context), and tokens that its calls have
    in prompts and completions beyond those of the rows (shared: computed once for several calls)."""
    counts: dict[int, Counter[str]] = {batch.number: Counter() for batch in run.manifests}
    for row in run.rows:
        count = counts[row.batch_number]
        count["trained"] += len(row.sources)
        count["context"] += len(row.tokens) - len(set(row.sources))
    lengths = {
        call.call_id: call.prompt_tokens + call.sampled_tokens for group in run.groups for call in group.calls
    }
    for batch in run.manifests:
        calls = {call for row in run.rows if row.batch_number == batch.number for call in row.call_ids}
        count = counts[batch.number]
        whole = sum(lengths.get(call, 0) for call in calls)
        count["shared"] = max(0, whole - count["trained"] - count["context"])
    return [counts[number] for number in sorted(counts)]
