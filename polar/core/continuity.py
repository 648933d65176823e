"""The next prompt of a session, out of the very ids that were sampled before.

A request that continues an earlier call gets that call's prompt ids + sampled ids + the closing
token where it is missing + the ids of what is new. A request with the history of an earlier call
gets that call's prompt again. Everything else is rendered in full: by the engine, or here where
untrusted text must be kept from becoming special tokens.

| relation | the request, against the calls before it |
|---|---|
| first | opens a conversation |
| extended | continues a call |
| drifted | the same; the tokenizer would have written the end of its answer in other ids |
| arguments_reserialized | the same; the harness spells the answer's arguments in another way |
| truncated | continues a call whose answer was cut: by length, a stop string, a broken connection |
| retry | has the history of an earlier call |
| edited | lacks an answer of its history, has another in its place, or other messages before it |
| thinking_stripped | the template takes back reasoning, or text around it, that was sampled |
| tools_changed, system_changed | the history of a call under other tools or system messages |
| compaction | a summary call, or the restart after one |
| subagent | opens with a task that an answer of the session gave, or says so itself |
| restarted | an agent that had calls before opens a history that shares no answer with them |
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from polar.core.chat_template import Message, TemplateError
from polar.core.continuity_table import Basis, ContinuityTable, KnownCall
from polar.core.cut_answers import kept_tokens
from polar.core.message_marks import HistoryMarks, Mark
from polar.core.relations import root_relation
from polar.core.rendering import Renderer
from polar.core.session_history import EncodedMessages, EncodedTools
from polar.core.template_messages import is_text_only, template_options
from polar.core.token_text import TokenText
from schemas.base import canonical_json, digest
from schemas.calls import Relation, Rendering

Policy = Literal["template", "preserve"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as continuity reads it."""

    messages: Sequence[Message]
    """In canonical form."""
    tools: Sequence[Mapping[str, Any]]
    fields: Mapping[str, Any]
    """Of the request: its template options are among them."""
    encoded: EncodedMessages
    """The messages."""
    encoded_tools: EncodedTools
    thread_id: str = ""
    kind: str = "agent"

    @classmethod
    def of(
        cls,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any],
        thread_id: str = "",
        kind: str = "agent",
    ) -> "Asked":
        """With what is encoded of it."""
        encoded, encoded_tools = EncodedMessages.of(messages), EncodedTools.of(tools)
        return cls(messages, tools, fields, encoded, encoded_tools, thread_id, kind)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a request's prompt comes about, and what the call is remembered by."""

    relation: Relation
    rendering: Rendering
    why_engine: str = ""
    """With rendering `engine`: why the ids are not made here."""
    parent: int | None = None
    """seq of the call that is continued with its ids."""
    prompt: TokenText | None = None
    """None where the engine renders, or `render` has yet to."""
    render: Callable[[], TokenText] | None = field(default=None, compare=False)
    """With rendering `local`: makes the prompt, which may take a while. Raises TemplateError."""
    basis: Basis | None = None
    """Known ids that the prompt begins with."""
    cut_tokens: int = 0
    """Sampled ids of the parent that the harness never saw, and that the prompt leaves out."""
    known: KnownCall = field(kw_only=True)
    """The call without number and answer, which `answered` adds."""


def plan(
    table: ContinuityTable,
    asked: Asked,
    renderer: Renderer | None,
    policy: Policy,
    why_engine: str = "",
    marks: dict[bytes, Mark] | None = None,
) -> Plan:
    """The prompt of the next call. `why_engine`: why its engine takes no ids, if it takes none.

    `marks`: of messages that were seen before; see HistoryMarks.
    """
    return _Planner(table, asked, renderer, policy, why_engine, marks).plan()


class _Planner:
    def __init__(
        self,
        table: ContinuityTable,
        asked: Asked,
        renderer: Renderer | None,
        policy: Policy,
        why_engine: str,
        marks: dict[bytes, Mark] | None,
    ) -> None:
        self._table = table
        self._asked = asked
        self._renderer = renderer
        self._policy = policy
        self._why_engine = why_engine
        self._marks = HistoryMarks(
            asked.messages, asked.encoded, call_ids=sees_call_ids(renderer), known=marks
        )
        self._before = self._marks.before if table.calls else {}
        self._options = template_options(asked.fields)
        self._reason = self._local_reason()
        self._tools = _tools_digest(asked.encoded_tools, self._options)
        self._known = KnownCall(
            0, None, asked.thread_id, asked.kind, self._marks.system, self._tools, self._marks.whole
        )

    def plan(self) -> Plan:
        twins = self._same(self._table.at(self._marks.whole))
        parent, at = self._parent()
        if parent is not None:
            self._known.parent = parent.seq
            self._known.thought_before = self._thinks_on(parent, at)
        twin = next((call for call in reversed(twins) if call.trunk is not None), None)
        if twin is not None and not self._reason:
            basis = Basis(twin.seq, twin.prompt_size)
            self._known.parent = twin.parent
            self._known.thought_before = twin.thought_before
            return self._planned("retry", "repeated", prompt=twin.prompt, parent=twin.parent, basis=basis)
        relation: Relation | None = "retry" if twins else self._dropped_answer(at)
        if parent is not None:
            return self._continued(relation or _continuing(self._asked.messages[at], parent), parent, at)
        if not twins:
            relation = root_relation(self._table, self._asked.messages, self._marks, self._known, relation)
        return self._in_full(relation or "first")

    def _parent(self) -> tuple[KnownCall | None, int]:
        """The last call of this history whose answer stands in it, and where; or (None, -1)."""
        messages = self._asked.messages
        for at in reversed(self._before):
            if messages[at]["role"] != "assistant":
                continue
            calls = self._same(self._table.at(self._before[at]))
            if not calls:
                continue
            mark = self._marks.mark(at)
            matching = [call for call in calls if call.answer == mark]
            if matching:
                return _likeliest(matching, messages[at]), at
        return None, -1

    def _same(self, calls: Sequence[KnownCall]) -> list[KnownCall]:
        return [call for call in calls if call.system == self._marks.system and call.tools == self._tools]

    def _dropped_answer(self, at: int) -> Relation | None:
        """Whether an answer later than the parent's belongs into this history and is not there."""
        for index, name in self._before.items():
            if index > at:
                for call in self._same(self._table.at(name)):
                    return "truncated" if call.answer is None else "edited"
        return None

    def _thinks_on(self, parent: KnownCall, at: int) -> bool:
        """Whether the user turn of this call has seen reasoning before it."""
        if any(message["role"] == "user" for message in self._asked.messages[at + 1 :]):
            return False
        return parent.has_reasoning or parent.thought_before

    def _continued(self, relation: Relation, parent: KnownCall, at: int) -> Plan:
        """Splice behind the parent's answer, where that is possible."""
        renderer, options = self._renderer, self._options
        if self._reason or renderer is None or options is None or parent.trunk is None:
            return self._planned(relation, "engine", why_engine=self._reason or "ids_unknown")
        messages = self._asked.messages
        tools = renderer.tools(self._asked.tools, self._tools)
        try:
            follows = renderer.continuation(messages[:at], parent.shape, messages[at + 1 :], tools, options)
            new = renderer.encoder.encode_marked(follows.text)
        except TemplateError:
            return self._planned(relation, "engine", why_engine="template_refuses")
        if not follows.keeps_history and self._policy == "template":
            self._known.parent = None
            self._known.thought_before = False
            return self._in_full("thinking_stripped")
        sampled = parent.sampled.tolist()
        kept, remainder = kept_tokens(renderer, sampled, parent.finish_reason, parent.stop_reason)
        tail = renderer.encoder.encode(remainder) if remainder else []
        closed = kept > 0 and kept == len(sampled) and sampled[-1] == renderer.close_id
        if not closed:
            tail = [*tail, renderer.close_id]
        tail = [*tail, *new]
        if relation in ("extended", "arguments_reserialized"):
            if not closed:
                relation = "truncated"
            elif relation == "extended" and not renderer.is_canonical(sampled):
                relation = "drifted"
        known = parent.ids
        if kept < len(sampled):
            known = parent.prompt.followed_by(TokenText.of(sampled[:kept]))
        return self._planned(
            relation, "spliced", parent=parent.seq, basis=Basis(parent.seq, len(known.text)),
            cut_tokens=len(sampled) - kept, prompt=known.followed_by(TokenText.of(tail)),
        )  # fmt: skip

    def _in_full(self, relation: Relation) -> Plan:
        """A whole rendering: here only where untrusted text needs protection, else by the engine."""
        renderer, options = self._renderer, self._options
        if self._reason or renderer is None or options is None:
            return self._planned(relation, "engine", why_engine=self._reason)
        if not renderer.needs_protection(self._asked.messages, self._asked.encoded.marks):
            return self._planned(relation, "engine", why_engine="plain")
        tools = renderer.tools(self._asked.tools, self._tools)
        messages = self._asked.messages
        return self._planned(
            relation, "local", render=lambda: TokenText.of(renderer.prompt(messages, tools, options))
        )

    def _local_reason(self) -> str:
        """Why nothing of this request can be rendered here; empty when it can."""
        if self._renderer is None:
            return "no_renderer"
        if self._why_engine:
            return self._why_engine
        if self._options is None:
            return "template_options"
        return "" if is_text_only(self._asked.messages) else "media"

    def _planned(self, relation: Relation, rendering: Rendering, **facts: Any) -> Plan:
        return Plan(relation, rendering, known=self._known, **facts)


def sees_call_ids(renderer: Renderer | None) -> bool:
    """Whether ids of tool calls are part of what the model sees."""
    return renderer is not None and renderer.shows_call_ids


def _continuing(answer: Message, parent: KnownCall) -> Relation:
    return "extended" if spelling(answer) == parent.spelling else "arguments_reserialized"


def _likeliest(calls: Sequence[KnownCall], answer: Message) -> KnownCall:
    """Of calls with equal history and answer: the one with these call ids, else the last."""
    ids = tuple(str(call.get("id")) for call in answer.get("tool_calls") or ())
    return next((call for call in reversed(calls) if call.call_ids == ids), calls[-1])


def spelling(answer: Message) -> bytes:
    """Digest of an answer's arguments as they are spelled."""
    state = hashlib.sha256()
    for call in answer.get("tool_calls") or ():
        arguments = (call.get("function") or {}).get("arguments")
        state.update(orjson.dumps(arguments, default=str) if not isinstance(arguments, str)
                     else arguments.encode("utf-8", "surrogatepass"))  # fmt: skip
        state.update(b"\0")
    return state.digest()[:16]


def _tools_digest(tools: EncodedTools, options: Mapping[str, Any] | None) -> str:
    return tools.digest if options == {} else digest(tools.digest.encode(), canonical_json(options))
