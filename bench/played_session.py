"""Plays one member of a generated group and records its calls as a gateway would."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bench.presets import Preset
from schemas.base import digest
from schemas.calls import CallRecord, Delivery, MessagesDelta, PromptDelta, ToolsDelta, Usage
from schemas.columns import FloatColumn, TokenColumn
from schemas.ids import call_id
from schemas.policies import PolicyInterval, PolicyVersion

SIGMA = 0.5
VOCABULARY = 151_669
END_OF_TURN = VOCABULARY - 1
"""Last id of every answer that is not lost, and of nothing else."""
RETOKENISED = 0.05
USER_TURN = 5
THINKING = 0.4
COMPACTION_ASK = 100
CHARACTERS_A_TOKEN = 4

Tokens = npt.NDArray[np.int32]
Kind = Literal["agent", "subagent", "compaction"]

_TEXT = "".join(f"{word:x} " for word in np.random.default_rng(0).integers(0, 1 << 28, 200_000).tolist())
_VERSION = PolicyVersion(lineage="bench", step=0)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a history and the ids that it is rendered to."""

    message: dict[str, Any]
    ids: Tokens
    thinking: int = 0
    """Leading ids that are thinking."""

    def without_thinking(self) -> "Turn":
        if not self.thinking:
            return self
        message = {key: value for key, value in self.message.items() if key != "reasoning"}
        return Turn(message, self.ids[self.thinking :])

    def retokenised(self, at: int, token: int) -> "Turn":
        """The same text with ids `at` and `at + 1` as one other id."""
        ids = np.concatenate([self.ids[:at], np.asarray([token], dtype=np.int32), self.ids[at + 2 :]])
        return Turn(self.message, ids, self.thinking)


class Source:
    """Draws lengths, ids and texts."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def length(self, mean: int) -> int:
        return max(1, round(float(self.rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA))))

    def ids(self, count: int) -> Tokens:
        return self.rng.integers(0, END_OF_TURN, count, dtype=np.int32)

    def text(self, tokens: int) -> str:
        size = tokens * CHARACTERS_A_TOKEN
        at = int(self.rng.integers(0, max(1, len(_TEXT) - size)))
        return _TEXT[at : at + size]

    def turn(self, role: str, mean: int) -> Turn:
        ids = self.ids(self.length(mean))
        return Turn({"role": role, "content": self.text(len(ids))}, ids)

    def answer(self, mean: int) -> Turn:
        ids = self.ids(self.length(mean))
        ids[-1] = END_OF_TURN
        thinking = int(len(ids) * THINKING)
        message = {
            "role": "assistant",
            "content": "",
            "reasoning": self.text(thinking),
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {
                        "name": "shell",
                        "arguments": f'{{"command":"{self.text(len(ids) - thinking)}"}}',
                    },
                }
            ],
        }
        return Turn(message, ids, thinking)


@dataclass(slots=True)
class _Chain:
    """A growing history: the main chain, or a sub-agent."""

    thread_id: str
    kind: Kind
    turns: list[Turn]
    observations: int = 0


@dataclass(frozen=True, slots=True)
class _Base:
    """A recorded call that prompts are encoded against."""

    seq: int
    ids: Tokens
    """Prompt and sampled ids."""
    messages: list[dict[str, Any]]


@dataclass(slots=True)
class PlayedSession:
    """Plays one member; `records` are its calls afterwards."""

    preset: Preset
    session_id: str
    group_id: str
    source: Source
    drift: np.random.Generator
    records: list[CallRecord] = field(default_factory=list)
    bases: dict[tuple[str, str], _Base] = field(default_factory=dict)
    """First and last call of each chain."""

    def run(self, system: Turn, task: Turn, subagent_system: Turn) -> None:
        """The whole session from the turns that it shares with others."""
        preset, source = self.preset, self.source
        compacts = preset.compaction_after if source.rng.random() < preset.compacting else 0
        main = _Chain("", "agent", [system, task])
        for number in range(1, preset.calls + 1):
            self._step(main)
            if number == compacts:
                ask = Turn(
                    {"role": "user", "content": "Summarise."}, np.arange(COMPACTION_ASK, dtype=np.int32)
                )
                summary = self._answered([*main.turns, ask], "", "compaction", source.answer(preset.summary))
                content = {"role": "user", "content": summary.message["reasoning"]}
                main.turns = [system, task, Turn(content, summary.ids)]
                continue
            if number in preset.subagents_after:
                own = _Chain(
                    f"sub-{number}", "subagent", [subagent_system, source.turn("user", preset.observation)]
                )
                for _ in range(preset.subagent_calls):
                    self._step(own)
                    self._observe(own)
            self._observe(main)

    def _step(self, chain: _Chain) -> None:
        """One call of a chain; its answer joins the history as it will come back."""
        answer = self.source.answer(self.preset.sampled)
        if self.source.rng.random() < self.preset.retried:
            lost = Turn(answer.message, self.source.ids(max(1, len(answer.ids) // 2)))
            self._answered(chain.turns, chain.thread_id, chain.kind, lost, Delivery.CLIENT_ABORTED)
        self._answered(chain.turns, chain.thread_id, chain.kind, answer)
        is_retokenised = self.drift.random() < RETOKENISED
        at, token = self.drift.random(), int(self.drift.integers(0, END_OF_TURN))
        if self.preset.drift and is_retokenised and len(answer.ids) > 2:
            answer = answer.retokenised(int(at * (len(answer.ids) - 2)), token)
        chain.turns = [*chain.turns, answer]

    def _observe(self, chain: _Chain) -> None:
        chain.observations += 1
        is_user_turn = chain.observations % USER_TURN == 0
        if self.preset.drift and is_user_turn:
            chain.turns = [turn.without_thinking() for turn in chain.turns]
        role = "user" if is_user_turn else "tool"
        chain.turns = [*chain.turns, self.source.turn(role, self.preset.observation)]

    def _answered(
        self,
        turns: Sequence[Turn],
        thread_id: str,
        kind: Kind,
        answer: Turn,
        delivery: Delivery = Delivery.DELIVERED,
    ) -> Turn:
        seq = len(self.records) + 1
        prompt = np.concatenate([turn.ids for turn in turns])
        messages = [turn.message for turn in turns]
        base, kept = self._base_of(prompt)
        kept_messages = _common_messages(base.messages, messages) if base else 0
        logprobs = -self.source.rng.exponential(0.5, len(answer.ids))
        is_lost = delivery is not Delivery.DELIVERED
        self.records.append(
            CallRecord(
                call_id=call_id(self.session_id, seq),
                session_id=self.session_id,
                group_id=self.group_id,
                seq=seq,
                thread_id=thread_id,
                kind=kind,
                request_digest=digest(prompt.tobytes()),
                prompt=PromptDelta(
                    base_call=base.seq if base else None, kept=kept, new_ids=_column(prompt[kept:])
                ),
                sampled_ids=_column(answer.ids),
                logprobs=FloatColumn.from_bytes(logprobs.astype("<f4").tobytes()),
                policy=PolicyInterval(first=_VERSION, last=_VERSION),
                engine_id="bench",
                messages=MessagesDelta(
                    base_call=base.seq if base else None,
                    kept=kept_messages,
                    new=tuple(messages[kept_messages:]),
                    digest=digest(str(seq).encode()),
                ),
                tools=ToolsDelta(digest=digest(kind.encode()), tools=()),
                answer=answer.message,
                sampling_used={"temperature": 1.0},
                finish_reason=None if is_lost else "tool_calls",
                usage=None
                if is_lost
                else Usage(prompt_tokens=len(prompt), completion_tokens=len(answer.ids)),
                stream=True,
                delivery=delivery,
            )
        )
        recorded = _Base(seq, np.concatenate([prompt, answer.ids]), messages)
        self.bases.setdefault((thread_id, "first"), recorded)
        self.bases[thread_id, "last"] = recorded
        return answer

    def _base_of(self, prompt: Tokens) -> tuple[_Base | None, int]:
        best, longest = None, 0
        for base in self.bases.values():
            shared = _common(base.ids, prompt)
            if shared > longest:
                best, longest = base, shared
        return best, longest


def _common(left: Tokens, right: Tokens) -> int:
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    at = int(differs.argmax()) if size else 0
    return at if size and differs[at] else size


def _common_messages(left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]) -> int:
    same = 0
    for old, new in zip(left, right, strict=False):
        if old is not new:
            break
        same += 1
    return same


def _column(ids: Tokens) -> TokenColumn:
    return TokenColumn.from_bytes(ids.astype("<i4").tobytes())
