"""What manifests and /metrics say about kinds, causes and sharing."""

import pytest

from polar.core.batch_metrics import group_metrics, sharing_ratios
from polar.core.batching import BatchChoice, BatchRule, make_batch
from polar.core.packer_stage import PackerCore
from polar.core.stitcher_stage import StitcherCore
from polar.core.stitching import stitch
from schemas.base import encode
from schemas.calls import Delivery
from schemas.codec import decode
from schemas.groups import ScoredGroup
from schemas.topics import BATCHES, CALLS, GROUPS, POLICIES
from tests.unit.core.call_records import SessionRecords
from tests.unit.core.feed import Feed
from tests.unit.core.occurrences import live_group


def records(member: int) -> SessionRecords:
    """3 + 2 tokens of an agent, 2 of a summary, 1 that nobody received, 2 of a title."""
    session = SessionRecords(f"t/{member}/0/1")
    session.call([1, 2], [3, 4, 5 + member])
    session.call([1, 9], [8, 8], kind="compaction", base=1)
    session.call([1, 2, 3, 7], [6, 6], base=1)
    session.call([1, 2], [2], delivery=Delivery.CLIENT_ABORTED)
    session.call([4], [4, 4], kind="auxiliary")
    return session


def group() -> ScoredGroup:
    return live_group(*(stitch(r.opened, r.records, r.sealed()) for r in (records(0), records(1))))


def test_a_manifest_tells_kinds_causes_and_ratios() -> None:
    manifest, _ = make_batch(0, BatchChoice([group()], []), BatchRule(row_tokens=32), None)
    metrics = manifest.metrics
    assert metrics["calls"] == 10
    assert metrics["sampled_tokens"] == 20
    assert metrics["sampled_share_by_kind"] == {
        "agent": 0.5, "auxiliary": 0.2, "compaction": 0.2, "untrainable": 0.1,
    }  # fmt: skip
    causes = metrics["calls_by_cause"]
    assert isinstance(causes, dict)
    assert causes["compaction"] >= 2
    assert metrics["unique_over_naive"] == pytest.approx(
        metrics["unique_tokens"] / metrics["naive_tokens"]  # type: ignore[operator]
    )
    assert metrics["excluded_members_by_reason"] == {}
    assert decode(encode(manifest), BATCHES) == manifest


def test_members_outside_the_baseline_are_counted_by_reason() -> None:
    made = group()
    out = [member.model_copy(update={"excluded": "timed_out"}) for member in made.members]
    counted = group_metrics([made.model_copy(update={"members": tuple(out)}), made])
    assert counted["excluded_members_by_reason"] == {"timed_out": 2.0}


def test_no_tokens_are_no_division_by_zero() -> None:
    nothing = {"unique_tokens": 0.0, "naive_tokens": 0.0, "computed_tokens": 0.0}
    assert sharing_ratios(nothing) == {"unique_over_naive": 0.0, "computed_over_unique": 0.0}
    assert group_metrics([]) == {
        "calls": 0.0, "sampled_tokens": 0.0, "sampled_share_by_kind": {}, "calls_by_cause": {},
        "excluded_members_by_reason": {},
    }  # fmt: skip


def test_the_stitcher_counts_causes_kinds_and_reasons() -> None:
    feed = Feed(StitcherCore(), CALLS)
    session = records(0)
    for event in (session.opened, *session.records, session.sealed()):
        feed(event)
    metrics = feed.core.metrics()
    assert metrics["sampled_tokens_by_kind_total"] == {
        "agent": 5, "compaction": 2, "untrainable": 1, "auxiliary": 2,
    }  # fmt: skip
    assert metrics["untrainable_calls_by_reason_total"] == {"client_aborted": 1, "auxiliary": 1}
    causes = metrics["calls_by_cause_total"]
    assert isinstance(causes, dict)
    assert causes["compaction"] == 2


def test_the_packer_shows_the_newest_manifest_also_after_a_restart() -> None:
    manifest, _ = make_batch(0, BatchChoice([group()], []), BatchRule(policy="p", row_tokens=32), None)
    feed = Feed(PackerCore(BatchRule(policy="p")), GROUPS, BATCHES, POLICIES, zone={"batches.v1": 1})
    assert "batch_row_fill" not in feed.core.metrics()
    feed(manifest, headers={"positions": "{}"})
    metrics = feed.core.metrics()
    assert metrics["batch_row_fill"] == manifest.metrics["row_fill"]
    assert metrics["batch_sampled_share_by_kind"] == manifest.metrics["sampled_share_by_kind"]
