"""The cause of each kind of break, and `unknown` where nothing tells."""

from typing import Any

import pytest

from polar.core.stitching import stitch
from schemas.trees import Split
from tests.unit.core.call_records import SessionRecords

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Go"}
MORE = {"role": "user", "content": "More"}
TOOL = {"type": "function", "function": {"name": "f"}}


def answer(content: str = "", arguments: str | None = None, **fields: Any) -> dict[str, Any]:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if arguments else {}) | fields


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": f"result of {name}"}


def split_of(
    first: dict[str, Any],
    second: dict[str, Any],
    prompts: tuple[list[int], list[int]] = ([1, 2], [1, 2, 9, 8]),
) -> Split:
    """The split of a second call; by default it parts at the first sampled token."""
    session = SessionRecords()
    session.call(prompts[0], [3, 4], **({"messages": [SYSTEM, ASK], "answer": answer("A")} | first))
    session.call(prompts[1], [5], **second)
    (split,) = stitch(session.opened, session.records, session.sealed()).calls[1].splits
    return split


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        (answer("A"), answer("A"), "retokenized"),
        (answer("A"), answer("B"), "assistant_rewritten"),
        (answer("A", reasoning_content="hm"), answer("A"), "thinking_stripped"),
        (answer("<think>hm</think>\n\nA"), answer("A"), "thinking_stripped"),
        (answer(arguments='{"a": 1, "b": 2}'), answer(arguments='{"b":2,"a":1}'), "arguments_reserialized"),
        (answer(arguments='{"a": 1'), answer(arguments='{"a": 1}'), "assistant_rewritten"),
        (answer(arguments='{"a": 1}'), answer("called f"), "assistant_rewritten"),
        (answer("A"), MORE, "truncated_history"),
        (answer("A"), {"role": "assistant", "content": "A", "tool_calls": "nonsense"}, "assistant_rewritten"),
    ],
)
def test_what_became_of_the_answer(old: dict[str, Any], new: dict[str, Any], cause: str) -> None:
    split = split_of({"answer": old}, {"messages": [SYSTEM, ASK, new, MORE]})
    assert (split.against, split.index, split.cause) == (1, 2, cause)


def test_system_and_tools_lie_in_front_of_the_history() -> None:
    early = ([1, 2, 3], [1, 7, 3])
    other = {"role": "system", "content": "Be long."}
    assert split_of({}, {"messages": [other, ASK]}, early).cause == "system_changed"
    assert split_of({}, {"messages": [SYSTEM, ASK], "tools": [TOOL]}, early).cause == "tools_changed"


def test_marks_of_the_session() -> None:
    messages = {"messages": [SYSTEM, ASK, answer("B"), MORE]}
    assert split_of({}, messages | {"thread_id": "sub"}).cause == "subagent"
    assert split_of({}, messages | {"kind": "subagent"}).cause == "subagent"
    assert split_of({}, messages | {"kind": "compaction"}).cause == "compaction"
    assert split_of({"kind": "compaction"}, messages).cause == "compaction"


def test_the_same_prompt_again() -> None:
    assert split_of({}, {"messages": [SYSTEM, ASK]}, ([1, 2], [1, 2])).cause == "retry"


@pytest.mark.parametrize(
    "prompts",
    [([7, 7, *range(10, 20)], [7, *range(10, 20), 9]), ([7, 1, 2], [7, 7, 1, 2]), ([1, 2, 3], [7, 1, 2, 3])],
)
def test_a_doubled_or_missing_first_token(prompts: tuple[list[int], list[int]]) -> None:
    assert split_of({}, {"messages": [SYSTEM, ASK, answer("A"), MORE]}, prompts).cause == "bos"


def test_a_window_that_slides_and_a_history_that_is_cut() -> None:
    first = {"messages": [SYSTEM, ASK, answer("A"), MORE], "answer": answer("B")}
    slid = [SYSTEM, MORE, answer("B"), ASK]
    assert split_of(first, {"messages": slid}, ([1, 2, 3], [1, 5])).cause == "truncated_history"
    assert split_of(first, {"messages": [SYSTEM, ASK]}, ([1, 2, 3], [1, 2])).cause == "truncated_history"


def test_tool_results_in_another_order() -> None:
    first = {"messages": [SYSTEM, ASK, answer("A"), result("x"), result("y")]}
    second = {"messages": [SYSTEM, ASK, answer("A"), result("y"), result("x"), answer("A"), MORE]}
    assert split_of(first, second, ([1, 2, 3], [1, 5])).cause == "tool_result_reordered"


def test_unknown_is_said_where_nothing_tells() -> None:
    assert split_of({"messages": []}, {"messages": []}).cause == "unknown"
    edited = [SYSTEM, {"role": "user", "content": "Go on"}, answer("A"), MORE]
    assert split_of({}, {"messages": edited}, ([1, 2], [1, 5])).cause == "unknown"


def test_a_broken_message_chain_is_unknown_and_no_error() -> None:
    session = SessionRecords()
    session.call([1, 2], [3], messages=[SYSTEM, ASK])
    for base, kept in ((9, 1), (2, 0), (1, 99)):
        record = session.call([1, 5], [6])
        delta = record.messages.model_copy(update={"base_call": base, "kept": kept})
        session.records[-1] = record.model_copy(update={"messages": delta})
    calls = stitch(session.opened, session.records, session.sealed()).calls
    assert {split.cause for call in calls for split in call.splits} <= {"unknown", "retry"}
