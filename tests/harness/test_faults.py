"""What goes wrong on the way does not stop a harness, and all of it is recorded."""

import pytest

from schemas.calls import Delivery
from tests.harness.harnesses import HARNESSES
from tests.harness.proof import CONTINUED, assert_continued, assert_no_key, assert_recorded
from tests.harness.script import BrokenStream, Refusal, Scene, Script, ToolCall, Turn
from tests.harness.stage import Stage

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", HARNESSES)
async def test_loop_through_faults(name: str, stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    harness = HARNESSES[name]
    good = harness.shell("echo hello > a.txt")
    broken = ToolCall(good.tool, '{"command": "echo broken')
    turns = [
        Turn("A first look.", (harness.shell("ls -la"),)),
        Turn("Now the file.", (broken,)),
        Turn("Again.", (good,)),
        Turn("", (harness.write(stage.folder / "b.txt", "world"),)),
        harness.last_turn(),
    ]
    scene = Scene(
        "main",
        turns,
        lambda conversation: bool(conversation.tool_names),
        faults={0: [Refusal(429, {"Retry-After": "1"})], 2: [Refusal(500)], 3: [BrokenStream()]},
        dropped={1} if harness.drops_bad_turns else set(),
        is_last=True,
    )
    title = Scene("title", [Turn("Two small files")], lambda _: True)
    played = await stage.perform(harness, Script([scene, title]))
    assert stage.engine.errors == []
    played.assert_ended(harness)
    assert played.folder.joinpath("a.txt").read_text() == "hello\n"
    assert played.folder.joinpath("b.txt").read_text().strip() == "world"
    pairs = [pair for pair in assert_recorded(played, harness.dialect) if pair[0].scene == "main"]
    assert [call.number for call, _ in pairs] == [0, 0, 1, 2, 2, 3, 3, 4]
    failed = [record for _, record in pairs if record.delivery is Delivery.UPSTREAM_ERROR]
    assert len(failed) == 3
    relations = assert_continued(pairs)
    assert relations[0] == "first"
    assert [relations[index] for index in (1, 4, 6)] == ["retry"] * 3
    assert {relations[index] for index in (2, 5, 7)} <= CONTINUED, relations
    # After the call that is no JSON: as the harness tells it in its next request.
    assert relations[3] in CONTINUED | {"edited", "retry"}
    assert_no_key(played, caplog.text)
