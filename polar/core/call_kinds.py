"""What a call is for: agent, sub-agent, compaction or auxiliary (titles, routing), and how we know.

Decided when the whole session is known. In this order: what the record says (a gateway reads the
harness's own marks), the marks themselves, the words by which harnesses ask for a summary, and the
structure: beside calls with tools, one without tools, with a system prompt and a first message of
its own, is no turn of the agent. The rule that decided stands in the trajectory.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from schemas.calls import CallRecord

Kind = Literal["agent", "subagent", "compaction", "auxiliary"]

_SUBAGENT_MARKS = (
    "x-codex-parent-thread-id", "x-openai-subagent", "x-claude-code-agent-id", "x-parent-session-id",
)  # fmt: skip
_SUMMARY_ASKS = ("CONTEXT CHECKPOINT COMPACTION", "Respond with TEXT ONLY", "<state_snapshot>")
"""In the last user message: Codex, Claude Code, Qwen Code."""
_CONVERSATION = "<conversation>"
"""How pi begins a conversation that it has summarised."""
_SUMMARISER = re.compile(r"summari[sz]|summary", re.IGNORECASE)
_TITLE = re.compile(r"\btitles?\b", re.IGNORECASE)
_TITLE_ASK_CHARACTERS = 200
_CARRIED_ON_CHARACTERS = 8
"""Shortest answer that is looked for in the history that follows."""
_SHAPES = ("response_format", "structured_outputs", "guided_json", "guided_grammar", "guided_choice")


@dataclass(frozen=True, slots=True)
class KindOf:
    """The kind of a call and the rule that decided it."""

    kind: Kind
    rule: str


AGENT = KindOf("agent", "default")


@dataclass(frozen=True, slots=True)
class _Outline:
    """What the structure rules look at, known from deltas without rebuilding a history."""

    leading: tuple[str, ...]
    """Texts of the system messages in front."""
    task: str | None
    """Text of the first message after them."""
    ask: str
    """Text of the last message, when it is the user's and new."""
    tools_digest: str
    has_tools: bool


def decide_kinds(records: Iterable[CallRecord]) -> dict[int, KindOf]:
    """Kind of each call of one session by its number; `records` in order of number."""
    ordered = list(records)
    outlines = _outlines(ordered)
    main = next((outline for outline in outlines.values() if outline.has_tools), None)
    kinds: dict[int, KindOf] = {}
    following: dict[str, CallRecord] = {}
    """Thread → its next call with tools."""
    for record in reversed(ordered):
        outline = outlines.get(record.seq)
        kinds[record.seq] = _kind(record, outline, main, following.get(record.thread_id))
        if outline is not None and outline.has_tools:
            following[record.thread_id] = record
    return {record.seq: kinds[record.seq] for record in ordered}


def _kind(
    record: CallRecord, outline: _Outline | None, main: _Outline | None, following: CallRecord | None
) -> KindOf:
    marked = _marked(record.native_ids)
    if record.kind != "agent":
        is_same = marked is not None and marked.kind == record.kind
        return marked if marked is not None and is_same else KindOf(record.kind, "recorded")
    if marked is not None:
        return marked
    if outline is None:
        return AGENT
    for words in _SUMMARY_ASKS:
        if words in outline.ask:
            return KindOf("compaction", "summary_asked")
    return _by_structure(record, outline, main, following) if main is not None else AGENT


def _marked(native_ids: Mapping[str, str]) -> KindOf | None:
    """What the harness itself says."""
    if native_ids.get("request_kind") == "compaction":
        return KindOf("compaction", "native:request_kind")
    mark = next((mark for mark in _SUBAGENT_MARKS if mark in native_ids), None)
    return KindOf("subagent", f"native:{mark}") if mark else None


def _by_structure(
    record: CallRecord, outline: _Outline, main: _Outline, following: CallRecord | None
) -> KindOf:
    """`main`: the first call of the session with tools."""
    is_elsewhere = outline.leading != main.leading and outline.task is not None and outline.task != main.task
    if outline.has_tools:
        is_subagent = is_elsewhere and outline.tools_digest != main.tools_digest
        return KindOf("subagent", "own_system_tools_and_task") if is_subagent else AGENT
    if any(_is_shaped(record.sampling_asked.get(name)) for name in _SHAPES):
        return KindOf("auxiliary", "shaped_without_tools")
    system = "\n".join(outline.leading)
    if outline.leading != main.leading and _TITLE.search(system):
        # Also for the very words of the task: they are what the title is of.
        return KindOf("auxiliary", "title_without_tools")
    if not is_elsewhere:
        return AGENT
    if _TITLE.search((outline.task or "")[:_TITLE_ASK_CHARACTERS]):
        return KindOf("auxiliary", "title_without_tools")
    if _SUMMARISER.search(system) or outline.ask.startswith(_CONVERSATION):
        return KindOf("compaction", "summary_without_tools")
    if following is not None and _is_carried_on(_text(record.answer), following):
        return KindOf("compaction", "answer_carried_on")
    return KindOf("auxiliary", "own_history_without_tools")


def _is_carried_on(answer: str, following: CallRecord) -> bool:
    """Whether an answer stands in what a later call newly sends: its history goes on from it."""
    return len(answer) >= _CARRIED_ON_CHARACTERS and any(
        answer in _text(message) for message in following.messages.new
    )


def _is_shaped(value: Any) -> bool:
    return value is not None and not (isinstance(value, Mapping) and value.get("type") in (None, "text"))


def _outlines(records: Iterable[CallRecord]) -> dict[int, _Outline]:
    """By number; a call whose base is not there, or without messages, has none."""
    outlines: dict[int, _Outline] = {}
    listed: dict[str, bool] = {}
    """Digest of a tool list → whether it holds any."""
    for record in records:
        tools = record.tools
        if tools.tools is not None:
            listed[tools.digest] = bool(tools.tools)
        delta, new = record.messages, record.messages.new
        base = outlines.get(delta.base_call) if delta.base_call is not None and delta.kept else None
        if (delta.kept and base is None) or not (delta.kept or new):
            continue
        leading = base.leading[: delta.kept] if base is not None else ()
        task = base.task if base is not None and delta.kept > len(base.leading) else None
        if task is None:
            before = list(itertools.takewhile(_is_system, new))
            leading += tuple(map(_text, before))
            task = _text(new[len(before)]) if len(new) > len(before) else None
        is_asked = bool(new) and new[-1].get("role") == "user"
        outlines[record.seq] = _Outline(
            leading=leading,
            task=task,
            ask=_text(new[-1]) if is_asked else "",
            tools_digest=tools.digest,
            has_tools=listed.get(tools.digest, True),
        )
    return outlines


def _is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("system", "developer")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "\n".join(part for part in parts if isinstance(part, str))
