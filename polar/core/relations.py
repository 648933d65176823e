"""How a conversation that continues no known call came about."""

from collections.abc import Sequence
from itertools import takewhile

from polar.core.chat_template import Message
from polar.core.continuity_table import ContinuityTable, KnownCall
from polar.core.message_marks import HistoryMarks
from schemas.calls import Relation


def root_relation(
    table: ContinuityTable,
    messages: Sequence[Message],
    marks: HistoryMarks,
    known: KnownCall,
    dropped: Relation | None,
) -> Relation:
    """The cause; see continuity.

    `known`: the call itself, before it is remembered. `dropped`: what an answer that belongs into
    this history and is not there would mean, if there is one.
    """
    if known.kind == "compaction":
        return "compaction"
    if not table.calls:
        return "subagent" if known.kind == "subagent" else "first"
    changed = _changed(table, messages, marks, known)
    if changed is not None:
        return changed
    earlier = [call for call in table.calls.values() if call.thread_id == known.thread_id]
    if known.kind == "subagent" and not earlier:
        return "subagent"
    heard = _heard(table, messages)
    if heard is not None:
        return heard
    if earlier and earlier[-1].kind == "compaction":
        return "compaction"
    if dropped is not None:
        return dropped
    if _knows_answer(table, messages, marks):
        return "edited"
    is_known_agent = any(call.system == known.system and call.tools == known.tools for call in earlier)
    return "restarted" if is_known_agent else "first"


def _changed(
    table: ContinuityTable, messages: Sequence[Message], marks: HistoryMarks, known: KnownCall
) -> Relation | None:
    """An answer or the whole history of a call under other tools or system messages."""
    for at in reversed(marks.before):
        if messages[at]["role"] == "assistant":
            mark = marks.mark(at)
            for call in reversed(table.at(marks.before[at])):
                if call.answer == mark:
                    return "system_changed" if call.system != known.system else "tools_changed"
    return None


def _heard(table: ContinuityTable, messages: Sequence[Message]) -> Relation | None:
    """A text of an earlier answer in what the conversation opens with."""
    # Only so far: a tool's result may repeat the path that it was called with.
    opening = "\n".join(
        message["content"]
        for message in takewhile(lambda message: message["role"] != "assistant", messages)
        if isinstance(message.get("content"), str)
    )
    for call in reversed(table.calls.values()):
        for text in call.said:
            if text in opening:
                return "subagent" if call.call_ids else "compaction"
    return None


def _knows_answer(table: ContinuityTable, messages: Sequence[Message], marks: HistoryMarks) -> bool:
    """Whether an answer of the session stands in this history, behind other messages than before."""
    answers = {call.answer for call in table.calls.values()}
    return any(
        marks.mark(index) in answers
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    )
