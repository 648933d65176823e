"""The ledgers find what is lost, doubled, unexplained or unfaithful, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest

from polar.demo.ledger import audit, summarize
from polar.demo.recorded import collect
from polar.demo.report import write_report
from schemas.calls import Delivery
from schemas.policies import PolicyInterval, PolicyVersion
from schemas.sessions import Outcome
from schemas.trajectories import Trajectory
from schemas.trees import StitchedCall, TokenTree
from tests.unit.demo.recorded_run import (
    FIRST,
    PROMPT,
    SESSION,
    V1,
    answer,
    answers,
    call,
    engine,
    entry,
    journal,
    manifest,
    published,
    recorded,
    row,
)


def test_a_run_in_agreement_has_nothing_to_report() -> None:
    run = recorded()
    summary = summarize(run, audit(run, answers(), journal()), seconds=12.34)
    assert summary == {
        "sessions": 1,
        "calls": 2,
        "calls_lost": 0,
        "calls_double": 0,
        "calls_redelivered": 0,
        "trained_tokens": 4,
        "trained_twice": 0,
        "unfaithful_tokens": 0,
        "steps": 1,
        "policies_published": 2,
        "policies_loaded": 2,
        "reward_first_quarter": 0.5,
        "reward_last_quarter": 0.5,
        "max_logprob_gap": 2e-5,
        "first_batch_tokens": 4,
        "gap_tokens": 4,
        "engine_requests_unexplained": 0,
        "engine_requests_interrupted": 0,
        "ready_depth_p50": 4.0,
        "seconds": 12.3,
    }


def test_a_journalled_answer_that_is_not_on_the_log_is_lost() -> None:
    run = recorded()
    assert audit(run, answers(), [*journal(), entry("r3")]).calls_lost == ("r3",)
    changed = replace(entry("r2"), content_sha256="0")
    assert audit(run, answers(), [entry("r1"), changed]).calls_lost == ("r2",)
    elsewhere = replace(entry("r2"), session="t/1/0/1")
    assert audit(run, answers(), [entry("r1"), elsewhere]).calls_lost == ("r2",)


def test_an_answer_under_two_calls_is_double_and_a_repeated_record_is_not() -> None:
    again = call(1, "r1", PROMPT, FIRST)
    account = audit(recorded(again), answers(), journal())
    assert (account.calls_double, account.calls_redelivered) == ((), 1)
    account = audit(recorded(call(3, "r1", PROMPT, FIRST)), answers(), journal())
    assert account.calls_double == ("r1",)


def test_two_choices_of_one_answer_are_two_calls() -> None:
    second = call(3, "r1", PROMPT, FIRST).model_copy(update={"choice_index": 1})
    assert audit(recorded(second), answers(), journal()).calls_double == ()


def test_a_raw_answer_needs_a_record_or_a_listed_reason() -> None:
    run = recorded()
    stray = answer(9, "r9", PROMPT, FIRST)
    assert audit(run, [*answers(), stray], journal()).unexplained == ("r9",)
    unsaid = replace(answers()[2], purpose="")
    assert audit(run, [unsaid, *answers()], journal()).unexplained == ("p1",)


@pytest.mark.parametrize("change", [{"complete": False}, {"forwarded": False}])
def test_an_answer_whose_asker_was_gone_is_interrupted(change: dict[str, object]) -> None:
    gone = answer(9, "r9", PROMPT, FIRST, **change)
    account = audit(recorded(), [gone, *answers()], journal())
    assert (account.unexplained, account.interrupted) == ((), ("r9",))


def test_a_call_listed_as_aborted_explains_its_raw_answer() -> None:
    aborted = call(3, "", PROMPT, ()).model_copy(update={"delivery": Delivery.CLIENT_ABORTED})
    raw = answer(9, "r9", PROMPT, FIRST, call=f"{SESSION}#3")
    account = audit(recorded(aborted), [*answers(), raw], journal())
    assert (account.unexplained, account.interrupted) == ((), ())


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"targets": [10, 11, 12, 99]}, 1),
        ({"tokens": [1, 2, 3, 10, 11, 99, 12, 13]}, 2),
        ({"tokens": [9, 2, 3, 10, 11, 4, 12, 13]}, 4),
        ({"engine_logprobs": [-1.0, -1.1, -1.2, -1.25]}, 1),
        ({"sources": [2, 3, 5, 5]}, 1),
        ({"segment_starts": [0, 5, 8], "range_counts": [0, 0]}, 2),
        ({"call_indexes": [0, 1, 0, 7]}, 1),
    ],
)
def test_each_position_is_compared_with_the_engines_own_ids(change: dict[str, object], wrong: int) -> None:
    run = recorded()
    run.rows = [row().model_validate(row().model_dump() | change)]
    assert audit(run, answers(), journal()).unfaithful_tokens == wrong


def test_a_token_without_its_raw_answer_is_unfaithful() -> None:
    assert audit(recorded(), answers()[:1], journal()).unfaithful_tokens == 2


def test_training_a_token_twice_is_seen() -> None:
    run = recorded()
    run.rows = [row(), row().model_copy(update={"index": 1})]
    account = audit(run, answers(), journal())
    assert (account.trained_tokens, account.trained_twice) == (8, 4)


def test_quarters_are_of_the_batches_in_order() -> None:
    rewards = [0.0, 0.1, 0.5, 0.5, 0.5, 0.5, 0.9, 1.0]
    run = recorded()
    run.manifests = [manifest(number, reward) for number, reward in enumerate(rewards)]
    summary = summarize(run, audit(run, answers(), journal()), seconds=0)
    assert summary["reward_first_quarter"] == 0.05
    assert summary["reward_last_quarter"] == 0.95


def test_restarts_do_not_count_a_step_or_a_load_twice() -> None:
    other = PolicyVersion(lineage="b", step=1)
    run = recorded(published(other, 0), engine(other), engine(other), engine(V1, status="failed"))
    summary = summarize(run, audit(run, answers(), journal()), seconds=0)
    assert (summary["steps"], summary["policies_published"], summary["policies_loaded"]) == (1, 3, 3)


def test_the_first_record_of_a_batch_wins() -> None:
    run = recorded(manifest(0, reward=0.9), row().model_copy(update={"tokens": row().positions}))
    assert [batch.mean_reward for batch in run.manifests] == [0.5]
    assert run.rows == [row()]


def test_the_report_is_one_page_without_outside_resources(tmp_path: Path) -> None:
    run = recorded()
    summary = {**summarize(run, audit(run, answers(), journal()), seconds=1), "note": "<script>"}
    write_report(tmp_path / "report.html", run, summary, model=None)
    page = (tmp_path / "report.html").read_text()
    for word in ("Mean reward", "Staleness", "READY depth", "Tokens of each batch", "max_logprob_gap"):
        assert word in page
    for outside in ("http:", "https:", "<script", "src=", "href=", "@import", "url("):
        assert outside not in page


def test_the_report_of_an_empty_run_is_a_page(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", collect([]), {}, model=None)
    assert "No trajectory" in (tmp_path / "report.html").read_text()


def test_the_drawn_tree_marks_what_was_sampled(tmp_path: Path) -> None:
    calls = (
        stitched(1, prompt=3, sampled=2, end_run=0, end_offset=5),
        stitched(2, prompt=6, sampled=2, end_run=1, end_offset=3),
    )
    trajectory = Trajectory(
        trajectory_id=f"trajectory:{SESSION}",
        session_id=SESSION,
        group_id="t",
        closed_by="sealed",
        outcome=Outcome.COMPLETED,
        declared_calls=2,
        tree=TokenTree(parents=[-1, 0, 0], starts=[0, 5, 8, 9], tokens=[1, 2, 3, 10, 11, 4, 12, 13, 99]),
        calls=calls,
        texts=(),
        algorithm="1",
    )
    write_report(tmp_path / "report.html", recorded(trajectory), {}, model=None)
    page = (tmp_path / "report.html").read_text()
    assert "1 2 3 <mark>10 11 </mark>" in page
    assert "4 <mark>12 13 </mark>" in page
    assert "<mark>99" not in page


def stitched(seq: int, *, prompt: int, sampled: int, end_run: int, end_offset: int) -> StitchedCall:
    return StitchedCall(
        call_id=f"{SESSION}#{seq}",
        session_id=SESSION,
        seq=seq,
        end_run=end_run,
        end_offset=end_offset,
        prompt_tokens=prompt,
        sampled_tokens=sampled,
        logprobs=[-1.0] * sampled,
        temperature=1.0,
        policy=PolicyInterval(first=V1, last=V1),
    )
