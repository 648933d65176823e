"""Which kind a call is of, and the rule that says so."""

from typing import Any

import pytest

from polar.core.call_kinds import decide_kinds
from polar.core.stitching import stitch
from tests.unit.core.call_records import SessionRecords

SYSTEM = {"role": "system", "content": "You write code."}
TASK = {"role": "user", "content": "Mend the parser."}
ANSWER = {"role": "assistant", "content": "Reading it now."}
SHELL = {"type": "function", "function": {"name": "shell"}}
SEARCH = {"type": "function", "function": {"name": "search"}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def decided(*calls: dict[str, Any]) -> list[tuple[str, str]]:
    """(kind, rule) of each call; the first call of the agent comes in front."""
    session = SessionRecords()
    session.call([1], [2], messages=[SYSTEM, TASK], tools=[SHELL], answer=ANSWER)
    for number, fields in enumerate(calls):
        session.call([1, 2, number], [3], **({"messages": [SYSTEM, TASK, ANSWER], "tools": [SHELL]} | fields))
    kinds = decide_kinds(session.records)
    assert kinds[1].kind == "agent"
    return [(kinds[seq].kind, kinds[seq].rule) for seq in range(2, len(calls) + 2)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("agent", "default")),
        ({"kind": "auxiliary"}, ("auxiliary", "recorded")),
        ({"native_ids": {"request_kind": "compaction"}}, ("compaction", "native:request_kind")),
        ({"native_ids": {"request_kind": "turn"}}, ("agent", "default")),
        ({"native_ids": {"x-openai-subagent": "review"}}, ("subagent", "native:x-openai-subagent")),
        ({"native_ids": {"x-claude-code-agent-id": "a1"}}, ("subagent", "native:x-claude-code-agent-id")),
        ({"native_ids": {"x-parent-session-id": "p"}}, ("subagent", "native:x-parent-session-id")),
        (
            {"kind": "subagent", "native_ids": {"x-parent-session-id": "p"}},
            ("subagent", "native:x-parent-session-id"),
        ),
        (
            {"kind": "compaction", "native_ids": {"x-parent-session-id": "p"}},
            ("compaction", "recorded"),
        ),
    ],
)
def test_marks_come_first(fields: dict[str, Any], expected: tuple[str, str]) -> None:
    assert decided(fields) == [expected]


@pytest.mark.parametrize(
    "ask",
    [
        "You are performing a CONTEXT CHECKPOINT COMPACTION. Write a handover.",
        "Go on.\n\nRespond with TEXT ONLY, no tool calls.",
        "Then, produce the <state_snapshot> XML.",
    ],
)
def test_words_by_which_harnesses_ask_for_a_summary(ask: str) -> None:
    asked = {"messages": [SYSTEM, TASK, ANSWER, user(ask)], "tools": []}
    assert decided(asked) == [("compaction", "summary_asked")]
    earlier = {"messages": [SYSTEM, TASK, user(ask), ANSWER, user("Now the next file.")]}
    assert decided(earlier) == [("agent", "default")]


OTHER = {"tools": [], "answer": {"role": "assistant", "content": "Parser mended"}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": [system("You name threads."), user("Generate a title:"), TASK]}, "title_without_tools"),
        ({"messages": [system("Give a title."), user("Mend it")]}, "title_without_tools"),
        (
            {"messages": [system("You judge how hard a task is."), user("Judge.")]},
            "own_history_without_tools",
        ),
        (
            {
                "messages": [SYSTEM, TASK],
                "sampling_asked": {"response_format": {"type": "json_schema", "json_schema": {}}},
            },
            "shaped_without_tools",
        ),
    ],
)
def test_side_calls_have_no_tools_and_a_history_of_their_own(fields: dict[str, Any], expected: str) -> None:
    assert decided(OTHER | fields) == [("auxiliary", expected)]


@pytest.mark.parametrize(
    "messages",
    [
        [system("You are a component that summarizes."), user("The talk so far: …")],
        [system("Short."), user("<conversation>\n[User]: Mend the parser.\n</conversation>")],
    ],
)
def test_a_summary_of_the_conversation_as_one_text(messages: list[dict[str, Any]]) -> None:
    assert decided(OTHER | {"messages": messages}) == [("compaction", "summary_without_tools")]


def test_an_answer_with_which_the_next_history_begins_was_a_summary() -> None:
    aside = OTHER | {"messages": [system("Short."), user("What did we do so far?")]}
    restart = {"messages": [SYSTEM, user("Before: Parser mended. Go on from there.")]}
    assert decided(aside, restart)[0] == ("compaction", "answer_carried_on")
    assert decided(aside, {"messages": [SYSTEM, user("Go on.")]})[0] == (
        "auxiliary",
        "own_history_without_tools",
    )


def test_another_agent_has_system_tools_and_task_of_its_own() -> None:
    other = {"messages": [system("You search."), user("Find the grammar.")], "tools": [SEARCH]}
    assert decided(other) == [("subagent", "own_system_tools_and_task")]
    for same in (
        {"tools": [SHELL]},
        {"messages": [SYSTEM, user("Find it.")]},
        {"messages": [system("You search."), TASK]},
    ):
        assert decided(other | same) == [("agent", "default")]


def test_an_edited_system_prompt_or_missing_tools_are_drift_and_no_other_kind() -> None:
    edited = {"messages": [system("You write code. Now 10:42."), TASK, ANSWER]}
    assert decided(edited, edited | {"tools": []}, {"tools": []}) == [("agent", "default")] * 3


def test_a_session_without_any_tools_has_one_kind() -> None:
    session = SessionRecords()
    session.call([1], [2], messages=[SYSTEM, TASK])
    session.call([3], [4], messages=[system("Give a title."), user("Title, please.")])
    assert {kind.rule for kind in decide_kinds(session.records).values()} == {"default"}


def test_deltas_tell_as_much_as_whole_histories() -> None:
    session = SessionRecords()
    session.call([1], [2], messages=[SYSTEM, TASK], tools=[SHELL])
    session.call([5], [6], messages=[system("You search."), user("Find it.")], tools=[SEARCH])
    for base, kept, new in (
        (2, 2, [ANSWER, user("More")]),
        (1, 2, [ANSWER]),
        (1, 1, [user("Anew")]),
        (9, 1, []),
    ):
        record = session.call([5, 6, 7], [8], messages=new, tools=[SEARCH if base == 2 else SHELL])
        delta = record.messages.model_copy(update={"base_call": base, "kept": kept})
        session.records[-1] = record.model_copy(update={"messages": delta})
    kinds = [kind.kind for kind in decide_kinds(session.records).values()]
    assert kinds == ["agent", "subagent", "subagent", "agent", "agent", "agent"]


def test_the_rule_stands_in_the_trajectory_and_auxiliary_calls_are_kept_untrained() -> None:
    session = SessionRecords()
    session.call([1], [2], messages=[SYSTEM, TASK], tools=[SHELL])
    session.call([3], [4], **(OTHER | {"messages": [system("Give a title."), user("Title?")]}))
    trajectory = stitch(session.opened, session.records, session.sealed())
    assert [(call.kind, call.kind_rule, call.untrainable) for call in trajectory.calls] == [
        ("agent", "default", None),
        ("auxiliary", "title_without_tools", "auxiliary"),
    ]
    assert len(trajectory.tree.tokens) == 4
