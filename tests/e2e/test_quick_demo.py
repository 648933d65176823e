"""The whole loop on this machine: embedded broker, vLLM, Megatron-Core, black-box agents."""

import json

import pytest

from tests.e2e.conftest import QuickDemo

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

KEYS = {
    "sessions", "calls", "calls_lost", "calls_double", "trained_tokens", "unfaithful_tokens", "steps",
    "policies_published", "policies_loaded", "reward_first_quarter", "reward_last_quarter",
    "max_logprob_gap", "gap_tokens", "engine_requests_unexplained", "ready_depth_p50", "seconds",
}  # fmt: skip


def test_the_summary_has_all_figures_and_they_are_right(quick_demo: QuickDemo) -> None:
    summary = quick_demo.summary
    assert summary.keys() >= KEYS
    assert summary["sessions"] == 48
    assert summary["calls"] == 96
    for name in ("calls_lost", "calls_double", "unfaithful_tokens", "engine_requests_unexplained"):
        assert summary[name] == 0, name
    assert summary["trained_twice"] == summary["engine_requests_interrupted"] == 0
    assert summary["steps"] == 2
    assert summary["policies_loaded"] >= 2
    assert summary["trained_tokens"] > 0
    assert summary["max_logprob_gap"] <= 1e-3
    assert summary["gap_tokens"] >= summary["first_batch_tokens"] > 0
    assert summary["ready_depth_p50"] > 0


def test_it_ends_within_four_minutes(quick_demo: QuickDemo) -> None:
    assert quick_demo.seconds < 240


def test_nothing_is_left_running(quick_demo: QuickDemo) -> None:
    assert quick_demo.left_over == []


def test_it_leaves_a_report_and_the_same_summary(quick_demo: QuickDemo) -> None:
    page = (quick_demo.data_dir / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<mark>" in page, "the drawn trajectory shows what was sampled"
    assert json.loads((quick_demo.data_dir / "summary.json").read_text()) == quick_demo.summary


def test_no_session_key_is_in_any_log(quick_demo: QuickDemo) -> None:
    for path in (quick_demo.data_dir / "logs").iterdir():
        assert "sk-polar-" not in path.read_text(errors="replace"), path
