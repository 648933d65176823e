"""A harness, a gateway's memory and an engine with forced answers, in one process.

The engine renders as vLLM does and samples an answer's text in ids that its tokenizer would not
write. The harness sends history back in its own spelling.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polar.core.answered_calls import answered
from polar.core.continuity import Asked, Plan, Policy, plan
from polar.core.continuity_table import ContinuityTable, KnownCall
from polar.core.rendering import Renderer
from polar.core.template_messages import conversation, template_options
from polar.core.token_text import TokenText

Message = dict[str, Any]


def forced_ids(renderer: Renderer, text: str, seed: int) -> list[int]:
    """Ids of a text, cut where no tokenizer would; its last token is the closing one if it ends so."""
    rng = random.Random(seed)
    closed = text.endswith(renderer.close)
    body = text.removesuffix(renderer.close)
    ids: list[int] = []
    while body:
        size = rng.randint(1, 7)
        ids += renderer.encoder.encode(body[:size])
        body = body[size:]
    return [*ids, renderer.close_id] if closed else ids


def engine_ids(renderer: Renderer, asked: Asked) -> list[int]:
    """The prompt as an engine makes it from messages."""
    return renderer.encoder.encode(rendered(renderer, asked.messages, asked, generation_prompt=True))


def rendered(
    renderer: Renderer, messages: Sequence[Mapping[str, Any]], asked: Asked, *, generation_prompt: bool
) -> str:
    """Messages as text, all of them, nothing protected."""
    template = renderer.template
    return template.render(
        conversation(messages, knows_developer=template.knows_developer),
        renderer.tools(asked.tools, json.dumps(asked.tools)),
        generation_prompt=generation_prompt,
        options=template_options(asked.fields) or {},
    )


def answer_text(renderer: Renderer, asked: Asked, answer: Message) -> str:
    """What a model writes for this answer, closing token included."""
    before = rendered(renderer, asked.messages, asked, generation_prompt=True)
    whole = rendered(renderer, [*asked.messages, answer], asked, generation_prompt=False)
    assert whole.startswith(before)
    text = whole[len(before) :]
    return text[: text.index(renderer.close) + len(renderer.close)]


@dataclass
class Turn:
    """One call."""

    asked: Asked
    planned: Plan
    known: KnownCall
    prompt: list[int]
    sampled: list[int]
    answer: Message


@dataclass
class Loop:
    """One session."""

    renderer: Renderer
    policy: Policy = "template"
    enabled: bool = True
    """Whether the gateway has the renderer."""
    table: ContinuityTable = field(default_factory=ContinuityTable)
    turns: list[Turn] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)
    numbered: int = 0
    """Calls so far, failed ones too."""
    by_seq: dict[int, Turn] = field(default_factory=dict)

    def plan(self, asked: Asked) -> Plan:
        """What the gateway would do."""
        planned = plan(self.table, asked, self.renderer if self.enabled else None, self.policy)
        return planned if planned.render is None else replace(planned, prompt=planned.render())

    def plan_of(self, messages: Sequence[Message], **of: Any) -> Plan:
        """The plan of a request with these messages."""
        return self.plan(
            Asked.of(
                messages, of.get("tools", ()), of.get("fields", {}), of.get("thread_id", ""),
                of.get("kind", "agent"),
            )
        )  # fmt: skip

    def fail(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
        fields: Mapping[str, Any] | None = None,
        thread_id: str = "",
        kind: str = "agent",
    ) -> Plan:
        """One request that its engine refuses."""
        planned = self.plan(Asked.of(messages, tools, fields or {}, thread_id, kind))
        self.numbered += 1
        known = answered(
            planned.known, self.numbered, {}, is_whole=False, has_reasoning=False,
            call_ids=self.renderer.shows_call_ids, finish_reason=None, stop_reason=None,
            prompt=TokenText(b"", 0), sampled_tokens=0,
        )  # fmt: skip
        row = self.table.add(known, None, planned.basis)
        assert row is not None
        self.rows.append(row)
        return planned

    def call(
        self,
        messages: Sequence[Message],
        answer: Message,
        *,
        tools: Sequence[Message] = (),
        fields: Mapping[str, Any] | None = None,
        text: str | None = None,
        sampled: Callable[[str], list[int]] | None = None,
        is_whole: bool = True,
        finish_reason: str = "stop",
        stop_reason: Any = None,
        thread_id: str = "",
        kind: str = "agent",
    ) -> Turn:
        """One request and its answer; `sampled` makes ids of its text (`text`: as the template has it)."""
        asked = Asked.of(messages, tools, fields or {}, thread_id, kind)
        planned = self.plan(asked)
        prompt = engine_ids(self.renderer, asked) if planned.prompt is None else planned.prompt.tolist()
        seed = len(self.turns)
        make = sampled or (lambda text: forced_ids(self.renderer, text, seed))
        ids = make(answer_text(self.renderer, asked, answer) if text is None else text)
        self.numbered += 1
        known = answered(
            planned.known, self.numbered, answer,
            is_whole=is_whole, has_reasoning="reasoning" in answer, call_ids=self.renderer.shows_call_ids,
            finish_reason=finish_reason, stop_reason=stop_reason,
            prompt=TokenText.of(prompt), sampled_tokens=len(ids),
        )  # fmt: skip
        row = self.table.add(known, TokenText.of([*prompt, *ids]), planned.basis)
        assert row is not None
        self.rows.append(row)
        turn = Turn(asked, planned, known, prompt, ids, answer)
        self.turns.append(turn)
        self.by_seq[known.seq] = turn
        return turn
