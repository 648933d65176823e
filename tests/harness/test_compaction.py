"""A harness compacts its history: another request, then a new history, all of it in the records."""

import pytest

from tests.harness.harnesses import HARNESSES, Harness
from tests.harness.proof import CONTINUED, assert_continued, assert_recorded
from tests.harness.script import CONTEXT_OVERFLOW, Conversation, Scene, Script, Turn
from tests.harness.stage import Performance, Stage

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

SUMMARY = "HANDOVER: a.txt is written, b.txt is still missing."
ASKS_FOR_SUMMARY = (
    "CONTEXT CHECKPOINT COMPACTION",  # codex
    "Respond with TEXT ONLY",  # claude
    "context checkpoint",  # pi
    "component that summarizes",  # qwen
)


def asks_for_summary(conversation: Conversation) -> bool:
    return any(words in conversation.text for words in ASKS_FOR_SUMMARY)


def scenes(harness: Harness, stage: Stage, first_command: str) -> list[Scene]:
    return [
        Scene("summary", [Turn(SUMMARY)], asks_for_summary),
        Scene(
            "afterwards",
            [Turn("On it goes.", (harness.write(stage.folder / "b.txt", "world"),)), harness.last_turn()],
            lambda conversation: SUMMARY in conversation.text,
            is_last=True,
            num_old_results=None,  # some harnesses keep the newest turns beside the summary
        ),
        Scene("title", [Turn("Two small files")], lambda conversation: not conversation.tool_names),
        Scene(
            "main",
            [
                Turn("The first one.", (harness.shell(first_command),)),
                Turn("A look.", (harness.shell("ls"),)),
                Turn("The history should have been compacted by now."),
            ],
            lambda _: True,
        ),
    ]


def assert_compacted(played: Performance, harness: Harness, stage: Stage) -> None:
    assert stage.engine.errors == []
    played.assert_ended(harness)
    assert played.folder.joinpath("a.txt").read_text() == "hello\n"
    assert played.folder.joinpath("b.txt").read_text().strip() == "world"
    pairs = [pair for pair in assert_recorded(played, harness.dialect) if pair[0].scene != "title"]
    order = [call.scene for call, _ in pairs]
    assert order == sorted(order, key=["main", "summary", "afterwards"].index)
    assert set(order) == {"main", "summary", "afterwards"}
    relations = assert_continued(pairs)
    after = order.index("afterwards")
    assert relations[after] == "compaction"
    # Qwen Code has an assistant's words of its own behind the summary, and joins the answer to them.
    own_words = {"compaction"} if harness.name == "qwen" else set()
    assert set(relations[after + 1 :]) <= CONTINUED | own_words


@pytest.mark.parametrize("name", ["qwen", "pi"])
async def test_after_the_engine_says_that_the_context_is_too_long(name: str, stage: Stage) -> None:
    harness = HARNESSES[name]
    parts = scenes(harness, stage, "echo hello > a.txt")
    parts[-1].faults = {1: [CONTEXT_OVERFLOW]}
    played = await stage.perform(harness, Script(parts))
    assert_compacted(played, harness, stage)


async def test_codex_at_the_tokens_that_were_reported(stage: Stage) -> None:
    harness = HARNESSES["codex"]
    played = await stage.perform(
        harness,
        Script(scenes(harness, stage, "echo hello > a.txt; seq 1 20000")),
        options={"config": "model_auto_compact_token_limit = 16000"},
    )
    assert_compacted(played, harness, stage)


async def test_claude_at_the_tokens_that_were_reported(stage: Stage) -> None:
    harness = HARNESSES["claude"]
    played = await stage.perform(
        harness, Script(scenes(harness, stage, "echo hello > a.txt; seq 1 2000")), context_tokens=50000
    )
    assert_compacted(played, harness, stage)
