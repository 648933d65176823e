"""Builds the records of a session from plain token lists, prompts delta-encoded as a gateway does."""

from collections.abc import Sequence
from typing import Any

from schemas.calls import (
    CallRecord,
    Delivery,
    MessagesDelta,
    PromptDelta,
    SessionAbandoned,
    SessionOpened,
    SessionSealed,
    ToolsDelta,
    Usage,
)
from schemas.columns import FloatColumn, TokenColumn
from schemas.ids import call_id
from schemas.policies import PolicyInterval, PolicyVersion
from schemas.sessions import Outcome

V1 = PolicyVersion(lineage="a", step=1)


def interval(first: int = 1, last: int | None = None, lineage: str = "a") -> PolicyInterval:
    return PolicyInterval(
        first=PolicyVersion(lineage=lineage, step=first),
        last=PolicyVersion(lineage=lineage, step=first if last is None else last),
    )


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Equal leading ids."""
    size = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        size += 1
    return size


class SessionRecords:
    """Records of one session, in order of number."""

    def __init__(self, session_id: str = "t/0/0/1", group_id: str | None = None) -> None:
        self.session_id = session_id
        self.group_id = group_id or session_id.split("/", maxsplit=1)[0]
        self.opened = SessionOpened(session_id=session_id, group_id=self.group_id, gateway_id="g")
        self.records: list[CallRecord] = []
        self.prompts: dict[int, list[int]] = {}
        self.paths: dict[int, list[int]] = {}

    def call(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        *,
        base: int | None = None,
        logprobs: Sequence[float] | None = None,
        messages: Sequence[dict[str, Any]] = (),
        tools: Sequence[dict[str, Any]] = (),
        **fields: Any,
    ) -> CallRecord:
        """The next call. `base`: number of the call that the prompt is encoded against."""
        seq = fields.pop("seq", len(self.records) + 1)
        kept = common(prompt, self.paths[base]) if base is not None else 0
        values: dict[str, Any] = {
            "request_digest": f"request-{seq}",
            "policy": interval(),
            "engine_id": "e",
            "answer": {"role": "assistant", "content": "x"},
            "sampling_used": {"temperature": 1.0},
            "finish_reason": "stop",
            "usage": Usage(prompt_tokens=len(prompt), completion_tokens=len(sampled)),
            "delivery": Delivery.DELIVERED,
        } | fields
        record = CallRecord(
            call_id=call_id(self.session_id, seq),
            session_id=self.session_id,
            group_id=self.group_id,
            seq=seq,
            prompt=PromptDelta(base_call=base, kept=kept, new_ids=TokenColumn(prompt[kept:])),
            sampled_ids=TokenColumn(sampled),
            logprobs=FloatColumn(logprobs if logprobs is not None else [-0.5] * len(sampled)),
            messages=MessagesDelta(new=tuple(messages), digest="m"),
            tools=ToolsDelta(digest=str(list(tools)), tools=tuple(tools)),
            **values,
        )
        self.records.append(record)
        self.prompts[seq] = list(prompt)
        self.paths[seq] = [*prompt, *sampled]
        return record

    def sealed(self, outcome: Outcome = Outcome.COMPLETED, calls: int | None = None) -> SessionSealed:
        return SessionSealed(
            session_id=self.session_id,
            group_id=self.group_id,
            calls=len(self.records) if calls is None else calls,
            outcome=outcome,
        )

    def abandoned(self) -> SessionAbandoned:
        return SessionAbandoned(session_id=self.session_id, group_id=self.group_id, reason="gateway lost")
