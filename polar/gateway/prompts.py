"""Prompts of a gateway's calls: earlier ids continued where that is possible, and what came of it.

The engines' way of rendering is proved per engine; where it is not the renderer's, the engine
renders every prompt itself, as it does without a renderer.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from polar.core.answered_calls import answered
from polar.core.chat_template import TemplateError
from polar.core.continuity import Asked, Plan, Policy, plan, sees_call_ids
from polar.core.dialects.base import ModelRequest
from polar.core.dialects.engine_answer import Captured, CapturedChoice
from polar.core.message_marks import Mark
from polar.core.recording import RecordedCall
from polar.core.rendering import Renderer
from polar.core.session_history import EncodedMessages, EncodedTools
from polar.core.token_text import TokenText
from polar.gateway.engines import EngineSlot
from polar.gateway.sessions import LiveSession
from schemas.calls import Continuity, Delivery

MAX_MARKS = 100_000
"""Marks that are kept, about 16 MB; above that all are forgotten."""
_IGNORED = ({"role": "user", "content": "The prompt is in kv_transfer_params."},)
"""Engines want messages beside ids, and look at nothing in them."""


class Prompts:
    """Plans prompts and counts how they came about."""

    def __init__(self, renderer: Renderer | None, policy: Policy, trouble: str = "") -> None:
        """`trouble`: why there is no renderer, in words."""
        self.renderer = renderer
        self.trouble = trouble
        self._policy = policy
        self._marks: dict[bytes, Mark] = {}
        """Of messages of all sessions: system prompts and histories come again and again."""
        self.relations: Counter[str] = Counter()
        self.renderings: Counter[str] = Counter()
        self.engine_reasons: Counter[str] = Counter()
        """Why engines rendered prompts."""
        self.forgotten = 0
        """Calls that left a session's memory because it had too many."""
        self.cut_tokens = 0
        """Sampled ids that no harness saw and no later prompt holds."""

    async def plan(
        self,
        live: LiveSession,
        request: ModelRequest,
        messages: EncodedMessages,
        tools: EncodedTools,
        slot: EngineSlot,
    ) -> Plan:
        """How the next call of a session gets its prompt; `messages`, `tools`: those of the request."""
        asked = Asked(
            request.messages, request.tools, request.fields, messages, tools, request.thread_id, request.kind
        )
        if len(self._marks) > MAX_MARKS:
            self._marks.clear()
        planned = plan(live.continuity, asked, self.renderer, self._policy, slot.rendering, self._marks)
        if planned.render is not None:
            try:
                # Only untrusted text that spells special tokens comes here; it may be long.
                ids = await asyncio.to_thread(planned.render)
                planned = replace(planned, prompt=ids)
            except TemplateError:
                planned = replace(planned, rendering="engine", why_engine="template_refuses")
        self.relations[planned.relation] += 1
        self.renderings[planned.rendering] += 1
        if planned.rendering == "engine":
            self.engine_reasons[planned.why_engine] += 1
        self.cut_tokens += planned.cut_tokens
        return planned

    def remember(
        self,
        live: LiveSession,
        planned: Plan,
        captured: Captured,
        records: Sequence[RecordedCall],
    ) -> list[bytes]:
        """Make recorded choices continuable; returns the rows that a restart needs for that."""
        rows = []
        forgotten = live.continuity.forgotten
        for record in records:
            choice = captured.choices.get(record.choice_index) or CapturedChoice()
            known = answered(
                planned.known,
                record.seq,
                choice.message,
                is_whole=record.delivery is Delivery.DELIVERED and not choice.left_out,
                has_reasoning=choice.has_reasoning,
                call_ids=sees_call_ids(self.renderer),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                prompt=record.prompt,
                sampled_tokens=len(record.sampled),
            )
            # Without a renderer nothing continues ids, so they need no room.
            ids = record.ids if record.prompt and self.renderer else None
            if (row := live.continuity.add(known, ids, planned.basis)) is not None:
                rows.append(row)
        self.forgotten += live.continuity.forgotten - forgotten
        return rows


def as_continuity(planned: Plan) -> Continuity:
    """What a record says of it."""
    return Continuity(
        relation=planned.relation,
        rendering=planned.rendering,
        parent=planned.parent,
        cut_tokens=planned.cut_tokens,
        why_engine=planned.why_engine,
    )


def put_ids(
    body: dict[str, Any], used: dict[str, Any], prompt: TokenText, context_tokens: int | None
) -> None:
    """Make an engine's request one for these prompt ids."""
    body["messages"] = _IGNORED
    body["kv_transfer_params"] = {"prompt_token_ids": orjson.Fragment(b"[" + prompt.text + b"]")}
    limit = body.get("max_tokens")
    if context_tokens is not None and isinstance(limit, int) and len(prompt) < context_tokens:
        # Engines lower limits while they render, and they render nothing here.
        body["max_tokens"] = used["max_tokens"] = min(limit, context_tokens - len(prompt))
