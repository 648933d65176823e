"""Two row builders to compare with, written from their descriptions: per_request and Polar's merging.

    expand(member)                → {seq: WholeCall}: every usable call with its whole prompt
    per_request(member)           → Traces: one a call
    polar_merging(member)         → Traces: NVIDIA Polar's `prefix_merging`
    judge(traces, member)         → Coverage: what of the member is trained, and under which prefix

Polar's rule: calls in order; a call joins the chain whose last prompt is the longest token prefix
of its own prompt, else it opens a chain. A chain is its first prompt and raw answers; what stands
between two answers is what follows the first end-of-turn id after the last prompt. The id is
the last one of the chain's first answer that ended by itself. Where it is not found the chain ends
there, and its later calls are dropped. Whether the next prompt really holds the raw answer is not
looked at, so a later answer may be trained under a prefix that no engine saw.

Polar records abandoned calls too; here both builders get delivered calls only, in its favour.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bench.workloads import SessionLoad
from schemas.calls import Delivery
from schemas.columns import TokenColumn

Tokens = npt.NDArray[np.int32]

_ENDED = ("stop", "tool_calls")


@dataclass(frozen=True, slots=True)
class WholeCall:
    """A delivered call without any delta."""

    seq: int
    prompt: Tokens
    sampled: Tokens
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Span:
    """Where a call's sampled ids lie in a trace."""

    seq: int
    start: int
    size: int


@dataclass(slots=True)
class Trace:
    """One causal sequence; the ids of its spans are trained."""

    tokens: Tokens
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Sampled tokens of delivered calls, by what became of them."""

    computed: int
    """Tokens of all traces."""
    sampled: int
    faithful: int
    """Trained, under exactly the prefix that the engine saw."""
    unfaithful: int
    """Trained under another prefix."""
    dropped: int
    """Not trained."""


def expand(member: SessionLoad) -> dict[int, WholeCall]:
    """Whole prompts from the deltas, by concatenation."""
    paths: dict[int, Tokens] = {}
    calls: dict[int, WholeCall] = {}
    for record in member.records:
        kept, new, sampled = record.prompt.kept, _ids(record.prompt.new_ids), _ids(record.sampled_ids)
        base = record.prompt.base_call
        prompt = new if base is None else np.concatenate([paths[base][:kept], new])
        paths[record.seq] = np.concatenate([prompt, sampled])
        if record.delivery is Delivery.DELIVERED:
            calls[record.seq] = WholeCall(record.seq, prompt, sampled, record.finish_reason)
    return calls


def per_request(member: SessionLoad) -> list[Trace]:
    """One trace a call: its prompt and its answer."""
    return [
        Trace(np.concatenate([call.prompt, call.sampled]), [Span(seq, len(call.prompt), len(call.sampled))])
        for seq, call in expand(member).items()
    ]


def polar_merging(member: SessionLoad) -> list[Trace]:
    """Chains of calls whose prompts grow, merged into one trace each."""
    chains: list[list[WholeCall]] = []
    for call in expand(member).values():
        tips = [
            (len(chain[-1].prompt), number)
            for number, chain in enumerate(chains)
            if _is_prefix(chain[-1].prompt, call.prompt)
        ]
        if tips:
            chains[max(tips)[1]].append(call)
        else:
            chains.append([call])
    return [_merged(chain) for chain in chains]


def judge(traces: Sequence[Trace], member: SessionLoad) -> Coverage:
    """Compare the prefix of every span with the prompt of its call."""
    calls = expand(member)
    faithful = unfaithful = 0
    for trace in traces:
        for span in trace.spans:
            prompt = calls[span.seq].prompt
            if span.start == len(prompt) and np.array_equal(trace.tokens[: span.start], prompt):
                faithful += span.size
            else:
                unfaithful += span.size
    sampled = sum(len(call.sampled) for call in calls.values())
    computed = sum(len(trace.tokens) for trace in traces)
    return Coverage(computed, sampled, faithful, unfaithful, sampled - faithful - unfaithful)


def total(coverages: Sequence[Coverage]) -> Mapping[str, float]:
    """Shares over several members."""
    sampled = sum(each.sampled for each in coverages)
    return {
        "computed_tokens": float(sum(each.computed for each in coverages)),
        "faithful": sum(each.faithful for each in coverages) / sampled,
        "unfaithful": sum(each.unfaithful for each in coverages) / sampled,
        "dropped": sum(each.dropped for each in coverages) / sampled,
    }


def _merged(chain: Sequence[WholeCall]) -> Trace:
    first = chain[0]
    pieces, size = [first.prompt, first.sampled], len(first.prompt) + len(first.sampled)
    spans = [Span(first.seq, len(first.prompt), len(first.sampled))]
    end_of_turn = next((int(call.sampled[-1]) for call in chain if call.finish_reason in _ENDED), None)
    for before, call in itertools.pairwise(chain):
        tail = call.prompt[len(before.prompt) :]
        found = np.flatnonzero(tail == end_of_turn) if end_of_turn is not None else tail[:0]
        if not len(found):
            break
        has_ended = len(before.sampled) and before.sampled[-1] == end_of_turn
        between = tail[int(found[0]) + (1 if has_ended else 0) :]
        pieces += [between, call.sampled]
        spans.append(Span(call.seq, size + len(between), len(call.sampled)))
        size += len(between) + len(call.sampled)
    return Trace(np.concatenate(pieces), spans)


def _is_prefix(head: Tokens, whole: Tokens) -> bool:
    return 0 < len(head) <= len(whole) and np.array_equal(head, whole[: len(head)])


def _ids(column: TokenColumn) -> Tokens:
    return np.frombuffer(column.data, dtype="<i4").astype(np.int32, copy=False)
