"""Reward programs: views of trajectories, scores, failures, restarts."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from polar.core.stage import Emit, LogRecord, Partition
from polar.errors import LogUnavailableError, SettingsError
from polar.rewards import TrajectoryView, reward
from polar.rewards.program import InvalidScoreError, RewardProgram, load_programs
from polar.rewards.running import MAX_AT_ONCE, Scoring
from schemas.columns import FloatColumn, TokenColumn
from schemas.dead_letters import DeadLetter
from schemas.policies import PolicyInterval, PolicyVersion
from schemas.rewards import Reward
from schemas.sessions import Outcome
from schemas.trajectories import CallText, Trajectory
from schemas.trees import StitchedCall, TokenTree

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "reward_demo.py"
VERSION = PolicyVersion(lineage="base", step=0)
Turn = tuple[str, str]


def trajectory(
    *calls: tuple[int | None, int, Sequence[Turn], str],
    session_id: str = "t/0/0/1",
    outcome: Outcome = Outcome.COMPLETED,
) -> Trajectory:
    """Calls as (base call, kept messages, new messages, answer)."""
    return Trajectory(
        trajectory_id=f"trajectory:{session_id}",
        session_id=session_id,
        group_id="t",
        closed_by="sealed",
        outcome=outcome,
        declared_calls=len(calls),
        tree=TokenTree(parents=TokenColumn(), starts=TokenColumn([0]), tokens=TokenColumn()),
        calls=tuple(
            StitchedCall(
                call_id=f"{session_id}#{seq}",
                session_id=session_id,
                seq=seq,
                end_run=-1,
                end_offset=0,
                prompt_tokens=0,
                sampled_tokens=0,
                logprobs=FloatColumn(),
                temperature=1.0,
                policy=PolicyInterval(first=VERSION, last=VERSION),
            )
            for seq in range(1, len(calls) + 1)
        ),
        texts=tuple(
            CallText(
                call_id=f"{session_id}#{seq}",
                new_messages=tuple({"role": role, "content": text} for role, text in new),
                kept_messages=kept,
                base_call=base,
                answer={"role": "assistant", "content": answer},
                tools_digest="d",
            )
            for seq, (base, kept, new, answer) in enumerate(calls, start=1)
        ),
        tools={"d": ({"type": "function", "function": {"name": "look"}},)},
        algorithm="test",
    )


class FakeWriter:
    def __init__(self) -> None:
        self.rewards: list[Reward] = []
        self.letters: list[DeadLetter] = []
        self.outages = 0

    async def write_many(self, events: Sequence[Emit]) -> list[Any]:
        if self.outages:
            self.outages -= 1
            raise LogUnavailableError("away")
        self.rewards += [emit.event for emit in events if isinstance(emit.event, Reward)]
        return []

    async def write_dead_letter(self, letter: DeadLetter, key: bytes | None, value: bytes | None) -> None:
        assert value
        self.letters.append(letter)


def record(value: Trajectory, offset: int = 0) -> LogRecord:
    return LogRecord(Partition("trajectories.v1", 0), offset, value.group_id, value)


async def score(program: RewardProgram, *values: Trajectory, writer: FakeWriter | None = None) -> FakeWriter:
    writer = writer or FakeWriter()
    scoring = Scoring([program], writer)  # type: ignore[arg-type]
    for offset, value in enumerate(values):
        await scoring.on_record(record(value, offset))
    await scoring.wait()
    return writer


# -- views ----------------------------------------------------------------------------------------


def test_a_view_rebuilds_whole_conversations() -> None:
    view = TrajectoryView(
        trajectory(
            (None, 0, [("system", "s"), ("user", "a")], "A"),
            (1, 2, [("assistant", "A"), ("user", "b")], "B"),
            (1, 1, [("user", "c")], "C"),
        )
    )
    assert [[message["content"] for message in call.messages] for call in view.calls] == [
        ["s", "a"],
        ["s", "a", "A", "b"],
        ["s", "c"],
    ]
    assert view.answers == ("A", "B", "C")
    assert view.last_answer == "C"
    assert [message["content"] for message in view.conversation] == ["s", "c", "C"]
    assert view.calls[0].tools[0]["function"]["name"] == "look"


def test_a_session_without_calls_has_an_empty_view() -> None:
    view = TrajectoryView(trajectory())
    assert (view.calls, view.last_answer, view.conversation) == ((), "", ())


def test_text_parts_are_joined() -> None:
    from polar.rewards.view import text_of

    assert (
        text_of({"content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"text": "b"}]}) == "a\nb"
    )
    assert text_of({"content": None}) == ""


# -- scores ---------------------------------------------------------------------------------------


@reward("brevity", evaluator="tests", version="3")
async def brevity(view: TrajectoryView) -> float:
    return 1.0 / len(view.calls)


async def test_a_number_becomes_a_reward_with_a_deterministic_id() -> None:
    value = trajectory((None, 0, [("user", "q")], "a"), (1, 1, [], "b"))
    first, second = await score(brevity, value), await score(brevity, value)
    (found,) = first.rewards
    assert (found.name, found.value, found.evaluator, found.version) == ("brevity", 0.5, "tests", "3")
    assert (found.session_id, found.group_id) == ("t/0/0/1", "t")
    assert first.rewards == second.rewards


async def test_several_names_and_names_left_out() -> None:
    @reward("a", "b", evaluator="tests")
    async def both(view: TrajectoryView) -> Mapping[str, float]:
        return {"b": 2.0}

    writer = await score(both, trajectory())
    assert [(found.name, found.value) for found in writer.rewards] == [("b", 2.0)]


@reward("a", "step", evaluator="tests")
async def both_ways(view: TrajectoryView) -> Mapping[str, float | Mapping[str, float]]:
    return {"a": 1.0, "step": {call.call_id: float(len(call.text)) for call in view.calls}}


async def test_single_calls_are_scored_by_their_ids() -> None:
    writer = await score(both_ways, trajectory((None, 0, [], "a"), (1, 0, [], "bcd")))
    assert [(found.name, found.call_ids, found.value) for found in writer.rewards] == [
        ("a", (), 1.0),
        ("step", ("t/0/0/1#1",), 1.0),
        ("step", ("t/0/0/1#2",), 3.0),
    ]
    assert len({found.reward_id for found in writer.rewards}) == 3


async def test_a_session_whose_calls_are_all_scored_is_not_scored_again() -> None:
    value = trajectory((None, 0, [], "a"), (1, 0, [], "b"))
    rewards = (await score(both_ways, value)).rewards
    for known, again in ((rewards, 0), (rewards[:-1], 3)):
        writer = FakeWriter()
        scoring = Scoring([both_ways], writer)  # type: ignore[arg-type]
        scoring.skip(
            [LogRecord(Partition("rewards.v1", 0), 0, "t", event) for event in known],
            {Partition("trajectories.v1", 0): 1},
        )
        await scoring.on_record(record(value))
        await scoring.wait()
        assert len(writer.rewards) == again


async def test_none_is_no_score() -> None:
    @reward("a", evaluator="tests")
    async def nothing(view: TrajectoryView) -> None:
        return None

    writer = await score(nothing, trajectory())
    assert not writer.rewards
    assert not writer.letters


async def test_sessions_that_did_not_end_by_themselves_are_not_scored() -> None:
    values = [trajectory(outcome=outcome, session_id=f"t/{n}/0/1") for n, outcome in enumerate(Outcome)]

    @reward("a", evaluator="tests")
    async def one(view: TrajectoryView) -> float:
        return 1.0

    writer = await score(one, *values)
    assert {found.session_id for found in writer.rewards} == {"t/0/0/1", "t/1/0/1"}


@pytest.mark.parametrize(
    "result", [math.nan, math.inf, True, "1", {"other": 1.0}, {"a": "x"}, {"a": {"t/9/0/1#1": 1.0}}]
)
async def test_nonsense_is_listed_and_stops_nothing(result: Any) -> None:
    @reward("a", evaluator="tests")
    async def odd(view: TrajectoryView) -> Any:
        return result if view.session_id == "t/0/0/1" else 1.0

    writer = await score(odd, trajectory(), trajectory(session_id="t/1/0/1"))
    assert [letter.reason for letter in writer.letters] == ["reward_invalid"]
    assert [found.session_id for found in writer.rewards] == ["t/1/0/1"]


async def test_a_function_that_raises_or_hangs_is_listed_and_stops_nothing() -> None:
    @reward("a", evaluator="tests", timeout_seconds=0.05)
    async def fragile(view: TrajectoryView) -> float:
        if view.session_id == "t/0/0/1":
            raise ZeroDivisionError
        if view.session_id == "t/1/0/1":
            await asyncio.sleep(600)
        return 1.0

    writer = await score(fragile, *(trajectory(session_id=f"t/{n}/0/1") for n in range(3)))
    assert {(letter.reason, letter.source_offset) for letter in writer.letters} == {
        ("reward_failed", 0),
        ("reward_timeout", 1),
    }
    assert [found.session_id for found in writer.rewards] == ["t/2/0/1"]


async def test_no_more_than_the_limit_are_scored_at_once() -> None:
    running, most = 0, 0

    @reward("a", evaluator="tests")
    async def slow(view: TrajectoryView) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return 1.0

    writer = await score(slow, *(trajectory(session_id=f"t/{n}/0/1") for n in range(3 * MAX_AT_ONCE)))
    assert len(writer.rewards) == 3 * MAX_AT_ONCE
    assert most == MAX_AT_ONCE


async def test_an_outage_delays_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.kafka.outages.PAUSE_SECONDS", 0.0)
    writer = FakeWriter()
    writer.outages = 2
    await score(brevity, trajectory((None, 0, [], "a")), writer=writer)
    assert len(writer.rewards) == 1


async def test_what_is_scored_already_is_skipped_and_then_forgotten() -> None:
    calls: list[str] = []

    @reward("a", evaluator="tests")
    async def count(view: TrajectoryView) -> float:
        calls.append(view.session_id)
        return 1.0

    values = [trajectory(session_id=f"t/{n}/0/1") for n in range(3)]
    old = (await score(count, values[0])).rewards
    calls.clear()
    scoring = Scoring([count], FakeWriter())  # type: ignore[arg-type]
    scoring.skip(
        [LogRecord(Partition("rewards.v1", 0), 0, "t", event) for event in old],
        {Partition("trajectories.v1", 0): 2},
    )
    for offset, value in enumerate(values):
        await scoring.on_record(record(value, offset))
    await scoring.wait()
    assert calls == ["t/1/0/1", "t/2/0/1"]
    assert not scoring._scored, "memory does not grow with the log"


def test_names_must_be_declared() -> None:
    with pytest.raises(SettingsError, match="name the rewards"):
        reward(evaluator="tests")
    program = reward("a", "b", evaluator="tests")(brevity.function)
    with pytest.raises(InvalidScoreError, match="return a dict"):
        program.rewards(TrajectoryView(trajectory()), 1.0)


# -- files ----------------------------------------------------------------------------------------


def test_files_are_loaded_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from polar.rewards import reward\n"
        "@reward('x', evaluator='mine')\n"
        "async def x(trajectory):\n    return 1.0\n"
    )
    (program,) = load_programs(file)
    assert program.names == ("x",)
    file.write_text("answer = 42\n")
    with pytest.raises(SettingsError, match="defines no reward"):
        load_programs(file)
    with pytest.raises(SettingsError, match="no Python file"):
        load_programs(tmp_path / "missing.py")


SHOP = [
    ("system", "Tools"),
    ("user", "What is the price of 4 x lamp?"),
    ("assistant", "GET lamp"),
    ("user", "lamp = 12"),
    ("user", "What is the price of 5 x carrot?"),
]


@pytest.mark.parametrize(
    ("price", "answer", "outcome"),
    [("carrot = 20", "ANSWER 100", 1.0), ("carrot = 20", "ANSWER 99", 0.0), ("lamp = 20", "ANSWER 100", 0.0)],
)
async def test_the_example_scores_the_shop(price: str, answer: str, outcome: float) -> None:
    (program,) = load_programs(EXAMPLE)
    value = trajectory(
        (None, 0, SHOP, "GET carrot"),
        (1, 5, [("assistant", "GET carrot"), ("user", price)], answer),
    )
    writer = await score(program, value)
    assert {found.name: found.value for found in writer.rewards} == {"outcome": outcome, "format": 1.0}


async def test_the_example_scores_letters_as_the_demo_does() -> None:
    from polar.demo.score import score_letters

    (program,) = load_programs(EXAMPLE)
    answers = ["abc xyz", "Mn!"]
    value = trajectory(
        (None, 0, [("user", "Write letters, please: rice")], answers[0]),
        (1, 1, [("assistant", answers[0]), ("user", "More, please.")], answers[1]),
    )
    writer = await score(program, value)
    assert {found.name: found.value for found in writer.rewards} == {
        "outcome": score_letters({"answers": answers}),
        "format": 1.0,
    }
