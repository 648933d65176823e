"""The cause of each kind of break, and `unknown` where nothing tells."""

from collections.abc import Sequence
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


WORDS = {
    1: "<s>",
    2: "Go",
    3: "It ",
    4: "works",
    5: "It works",
    6: " well",
    7: "<think>",
    8: "hm",
    9: "</think>",
}


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS.get(each, "") for each in ids)


def splits(session: SessionRecords, *, decoded: bool = True) -> dict[int, Split]:
    """By number of the call."""
    trajectory = stitch(session.opened, session.records, session.sealed(), None, decode if decoded else None)
    return {call.seq: split for call in trajectory.calls for split in call.splits}


def test_a_split_shows_the_text_on_both_sides_and_its_message() -> None:
    session = SessionRecords()
    session.call([1, 2], [3, 4], messages=[SYSTEM, ASK], answer=answer("It works"))
    session.call([1, 2, 5, 6], [4], messages=[SYSTEM, ASK, answer("It works"), MORE])
    split = splits(session)[2]
    assert (split.index, split.cause, split.message) == (2, "retokenized", 2)
    assert (split.held_text, split.found_text) == ("It works", "It works well")
    assert split.detail == "equal text, other ids"
    without = splits(session, decoded=False)[2]
    assert (without.cause, without.message, without.held_text, without.found_text) == (
        "retokenized",
        2,
        "",
        "",
    )


def test_equal_text_tells_a_retokenisation_where_no_messages_are_known() -> None:
    session = SessionRecords()
    session.call([1, 2], [3, 4])
    session.call([1, 2, 5, 6], [4])
    session.call([1, 2, 8, 6], [4])
    assert {seq: split.cause for seq, split in splits(session).items()} == {2: "retokenized", 3: "unknown"}
    assert {split.cause for split in splits(session, decoded=False).values()} == {"unknown"}


@pytest.mark.parametrize("decoded", [False, True])
def test_thinking_that_a_template_leaves_out_though_the_messages_hold_it(decoded: bool) -> None:
    thought = answer("It works", reasoning="hm")
    session = SessionRecords()
    session.call([1, 2], [7, 8, 9, 3, 4, 20, 21], messages=[SYSTEM, ASK], answer=thought)
    session.call([1, 2, 3, 4, 20, 21, 6], [4], messages=[SYSTEM, ASK, thought, MORE])
    split = splits(session, decoded=decoded)[2]
    assert (split.index, split.cause, split.message) == (2, "thinking_stripped", 2)


def test_the_first_divergent_token_names_the_cause_and_not_a_later_message() -> None:
    """Answer 1 comes back with other ids and the same text; answer 2 comes back rewritten."""
    session = SessionRecords()
    session.call([1, 2], [3, 4, 30], messages=[SYSTEM, ASK], answer=answer("It works"))
    session.call(
        [1, 2, 3, 4, 30, 31],
        [8, 30],
        base=1,
        messages=[SYSTEM, ASK, answer("It works"), MORE],
        answer=answer("hm"),
    )
    history = [SYSTEM, ASK, answer("It works"), MORE, answer("never said"), MORE]
    session.call([1, 2, 5, 30, 31, 6, 30, 31], [4], messages=history)
    split = splits(session)[3]
    assert (split.index, split.cause, split.message) == (2, "retokenized", 2)
    session.call([1, 2, 3, 4, 30, 31, 6, 30, 31], [4], messages=history)
    split = splits(session)[4]
    assert (split.index, split.cause, split.message) == (6, "assistant_rewritten", 4)


def test_marks_and_ids_that_no_template_renders_are_no_difference() -> None:
    cached = {
        "role": "user",
        "content": [{"type": "text", "text": "Go", "cache_control": {"type": "ephemeral"}}],
    }
    old, new = answer(arguments='{"a": 1}'), answer(arguments='{"a": 1}')
    new["tool_calls"][0]["id"] = "renamed"
    split = split_of(
        {"messages": [SYSTEM, cached], "answer": old}, {"messages": [SYSTEM, ASK, new, result("x")]}
    )
    assert split.cause == "retokenized"


def test_a_change_deep_in_the_history_is_not_blamed_on_tools_or_system() -> None:
    session = SessionRecords()
    session.call([1, 2], [3, 4], messages=[SYSTEM, ASK], answer=answer("A"))
    session.call([1, 2, 5, 6], [4], messages=[SYSTEM, ASK, answer("B"), MORE], tools=[TOOL])
    assert splits(session)[2].cause == "assistant_rewritten"


def test_long_delta_chains_give_the_messages_of_both_sides() -> None:
    session = SessionRecords()
    turns: list[dict[str, Any]] = [SYSTEM, ASK]
    prompt = [1, 2]
    for number in range(40):
        session.call(prompt, [3, 4], base=number or None, messages=turns[-2:], answer=answer(f"A{number}"))
        delta = session.records[-1].messages.model_copy(
            update={"base_call": number or None, "kept": len(turns) - 2}
        )
        session.records[-1] = session.records[-1].model_copy(update={"messages": delta})
        came_back = answer(f"A{number}" if number != 38 else "edited")
        prompt = [*prompt, 3, 4, 5] if number != 38 else [*prompt, 3, 9, 5]
        turns += [came_back, MORE]
    (split,) = splits(session).values()
    assert (split.against, split.cause, split.message) == (39, "assistant_rewritten", len(turns) - 4)
