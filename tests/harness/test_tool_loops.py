"""Every harness finishes a loop of several tool calls through the gateway, and all of it is recorded."""

import pytest

from tests.harness.harnesses import HARNESSES, Harness
from tests.harness.proof import assert_chain, assert_continued, assert_no_key, assert_recorded
from tests.harness.script import Scene, Script, Turn
from tests.harness.stage import Stage

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]


def title_scene() -> Scene:
    """opencode lets the model find a title, without tools, beside the first turn."""
    return Scene("title", [Turn("Two small files")], lambda conversation: not conversation.tool_names)


def main_scene(harness: Harness, stage: Stage) -> Scene:
    work = stage.folder
    turns = [
        Turn("The first file: naïve façade, 你好 🙂.", (harness.shell("echo hello > a.txt; ls -la"),)),
        Turn("", (harness.write(work / "b.txt", "world"),)),
        Turn("Both are written; I look at them.", (harness.shell("cat a.txt b.txt; echo step-3-done"),)),
        harness.last_turn(),
    ]
    return Scene("main", turns, lambda conversation: bool(conversation.tool_names), is_last=True)


@pytest.mark.parametrize("name", HARNESSES)
async def test_loop_of_tools(name: str, thinking_stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    harness, stage = HARNESSES[name], thinking_stage
    played = await stage.perform(harness, Script([title_scene(), main_scene(harness, stage)]))
    assert stage.engine.errors == []
    played.assert_ended(harness)
    assert played.folder.joinpath("a.txt").read_text() == "hello\n"
    assert played.folder.joinpath("b.txt").read_text().strip() == "world"
    pairs = assert_recorded(played, harness.dialect)
    main = [(call, record) for call, record in pairs if call.scene == "main"]
    assert [call.number for call, _ in main] == [0, 1, 2, 3]
    assert all(record.stream is harness.streams for _, record in main)
    assert_continued(pairs)
    assert_chain(main)
    assert_no_key(played, caplog.text)
