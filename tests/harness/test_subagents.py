"""Sub-agents share their session's key and are told apart in its records."""

import re

import pytest

from tests.harness.harnesses import HARNESSES, Harness
from tests.harness.proof import CONTINUED, assert_continued, assert_recorded
from tests.harness.script import Conversation, Scene, Script, Turn, tool_call
from tests.harness.stage import Performance, Stage

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

MAIN_TASK = "Send an agent for an errand and tell when it is done."
ERRAND = "Write the file errand.txt and report its length."


def errand_scene(harness: Harness) -> Scene:
    """The sub-agent's own conversation: begins with the errand, and nothing of the main one."""
    turns = [
        Turn("I go.", (harness.shell("echo from-errand > errand.txt; wc -c errand.txt"),)),
        Turn("It has twelve characters."),
    ]
    return Scene("errand", turns, is_errand)


def is_errand(conversation: Conversation) -> bool:
    return ERRAND in conversation.text and MAIN_TASK not in conversation.text


def assert_told_apart(played: Performance, harness: Harness) -> None:
    pairs = assert_recorded(played, harness.dialect)
    threads = {
        scene: {r.thread_id for call, r in pairs if call.scene == scene} for scene in ("main", "errand")
    }
    assert all(len(names) == 1 and "" not in names for names in threads.values()), threads
    assert threads["main"] != threads["errand"]
    relations = assert_continued(pairs)
    # The sub-agent's first call is no continuation; every other one is.
    opening = next(index for index, (call, _) in enumerate(pairs) if call.scene == "errand")
    assert relations[opening] == "subagent"
    assert set(relations[1:opening] + relations[opening + 1 :]) <= CONTINUED, relations
    for call, record in pairs:
        assert record.kind == ("subagent" if call.scene == "errand" else "agent")


async def test_claude_waits_for_an_agent_in_the_background(stage: Stage) -> None:
    harness = HARNESSES["claude"]
    start = tool_call("Agent", description="An errand", prompt=ERRAND)
    turns = [
        Turn("Somebody else shall do it.", (start,)),
        Turn("Now I wait."),
    ]
    main = Scene("main", turns, lambda _: True)
    told = Scene(
        "main",
        [Turn("It is done: errand.txt is there.")],
        lambda conversation: "<task-notification>\n" in conversation.text,
        is_last=True,
    )
    played = await stage.perform(harness, Script([errand_scene(harness), told, main]), task=MAIN_TASK)
    assert stage.engine.errors == []
    played.assert_ended(harness)
    assert "errand.txt is there" in played.finished.output
    assert played.folder.joinpath("errand.txt").read_text() == "from-errand\n"
    assert_told_apart(played, harness)


async def test_codex_waits_for_an_agent_that_it_spawned(stage: Stage) -> None:
    harness = HARNESSES["codex"]

    def wait(conversation: Conversation) -> Turn:
        agent = re.search(r'"agent_id": *"([^"]+)"', conversation.text)
        targets = [agent[1] if agent else "nobody"]
        return Turn("", (tool_call("multi_agent_v1__wait_agent", targets=targets, timeout_ms=60000),))

    turns = [
        Turn("Somebody else shall do it.", (tool_call("multi_agent_v1__spawn_agent", message=ERRAND),)),
        wait,
        Turn("It is done: errand.txt is there."),
    ]
    main = Scene("main", turns, lambda _: True, is_last=True)
    played = await stage.perform(harness, Script([errand_scene(harness), main]), task=MAIN_TASK)
    assert stage.engine.errors == []
    played.assert_ended(harness)
    assert "errand.txt is there" in played.finished.output
    assert played.folder.joinpath("errand.txt").read_text() == "from-errand\n"
    assert_told_apart(played, harness)
