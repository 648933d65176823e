"""A small recorded run with its witnesses, in agreement; tests then break one thing at a time."""

import hashlib

from polar.demo.recorded import Recorded, collect
from polar.demo.witness import Answer, JournalEntry
from schemas.batches import BatchManifest, PackedRow
from schemas.calls import CallRecord, Delivery, MessagesDelta, PromptDelta, SessionOpened, ToolsDelta
from schemas.engines import EngineState
from schemas.nodes import NodeHeartbeat, StageCounts
from schemas.policies import PolicyInterval, PolicyPublished, PolicyVersion

V0 = PolicyVersion(lineage="a", step=0)
V1 = PolicyVersion(lineage="a", step=1)
SESSION = "t/0/0/1"
PROMPT, FIRST, MORE, SECOND = (1, 2, 3), (10, 11), (4,), (12, 13)


def call(seq: int, response: str, prompt: tuple[int, ...], sampled: tuple[int, ...]) -> CallRecord:
    return CallRecord(
        call_id=f"{SESSION}#{seq}",
        session_id=SESSION,
        group_id="t",
        seq=seq,
        request_digest="d",
        prompt=PromptDelta(new_ids=list(prompt)),
        sampled_ids=list(sampled),
        logprobs=[-float(token) / 10 for token in sampled],
        policy=PolicyInterval(first=V0, last=V0),
        engine_id="engine-0",
        engine_request_id=response,
        messages=MessagesDelta(digest="m"),
        tools=ToolsDelta(digest="t"),
        answer={"role": "assistant", "content": f"text of {response}"},
        sampling_used={"temperature": 1.0},
        delivery=Delivery.DELIVERED,
    )


def answer(
    number: int, response: str, prompt: tuple[int, ...], sampled: tuple[int, ...], **changes
) -> Answer:
    values = {
        "number": number,
        "at": 0.0,
        "purpose": "call",
        "call": f"{SESSION}#{number}",
        "status": 200,
        "complete": True,
        "forwarded": True,
        "response_id": response,
        "prompt_ids": prompt,
        "token_ids": sampled,
        "logprobs": tuple(-token / 10 for token in sampled),
    }
    return Answer(**{**values, **changes})


def entry(response: str) -> JournalEntry:
    return JournalEntry(SESSION, response, hashlib.sha256(f"text of {response}".encode()).hexdigest())


def row() -> PackedRow:
    """Both calls on one path: prompt, first, more, second; the four sampled tokens are trained."""
    tokens = (*PROMPT, *FIRST, *MORE, *SECOND)
    return PackedRow(
        policy="policy",
        batch_number=0,
        index=0,
        tokens=list(tokens),
        positions=list(range(len(tokens))),
        segment_starts=[0, len(tokens)],
        range_counts=[0],
        range_starts=[],
        range_ends=[],
        sources=[2, 3, 5, 6],
        targets=[10, 11, 12, 13],
        engine_logprobs=[-1.0, -1.1, -1.2, -1.3],
        temperatures=[1.0] * 4,
        weights=[0.25] * 4,
        advantages=[1.0] * 4,
        call_ordinals=[0, 0, 1, 1],
        call_indexes=[0, 1, 0, 1],
        call_ids=(f"{SESSION}#1", f"{SESSION}#2"),
        first_versions=(V0, V0),
        last_versions=(V0, V0),
    )


def manifest(number: int = 0, reward: float = 0.5) -> BatchManifest:
    return BatchManifest(
        policy="policy",
        number=number,
        groups=("t",),
        live_groups=("t",),
        policy_version=V0,
        builder="prefix_merging",
        row_tokens=64,
        row_count=1,
        rows_digest="",
        row_lengths=[8],
        row_pairs=(36,),
        live_rollouts=1,
        trained_tokens=4,
        mean_reward=reward,
        algorithm="1",
    )


def published(version: PolicyVersion, batch: int, **metrics: float) -> PolicyPublished:
    return PolicyPublished(
        policy="policy",
        version=version,
        parent=V0 if version is V1 else None,
        weights_path="w",
        weights_sha256="0",
        batch_number=batch,
        metrics=metrics,
    )


def engine(version: PolicyVersion, status: str = "ready") -> EngineState:
    return EngineState(engine_id="engine-0", url="u", policy="policy", version=version, status=status)


def heartbeat(seq: int, ready: int, running: int) -> NodeHeartbeat:
    return NodeHeartbeat(
        node_id="node-0",
        incarnation="i",
        seq=seq,
        max_sessions=8,
        max_ready=8,
        counts=StageCounts(ready=ready, running=running),
    )


def recorded(*more) -> Recorded:
    full = (*PROMPT, *FIRST, *MORE)
    return collect(
        [
            SessionOpened(session_id=SESSION, group_id="t", gateway_id="gateway-0"),
            call(1, "r1", PROMPT, FIRST),
            call(2, "r2", full, SECOND),
            manifest(),
            row(),
            published(V0, -1),
            published(V1, 0, max_logprob_gap=2e-5, gap_tokens=4.0),
            engine(V0),
            engine(V1),
            heartbeat(1, 9, 0),
            heartbeat(2, 3, 1),
            heartbeat(3, 5, 2),
            heartbeat(4, 4, 1),
            heartbeat(5, 0, 0),
            *more,
        ]
    )


def answers() -> list[Answer]:
    return [
        answer(1, "r1", PROMPT, FIRST),
        answer(2, "r2", (*PROMPT, *FIRST, *MORE), SECOND),
        answer(3, "p1", (5,), (6,), purpose="probe", call=""),
        answer(4, "c1", (5,), (6,), purpose="canary", call=""),
    ]


def journal() -> list[JournalEntry]:
    return [entry("r1"), entry("r2")]
