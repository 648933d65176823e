"""Gaps wait until they fill or are old; holes at the end of a partition are noticed."""

from polar.core.stage import Partition
from polar.kafka.tail import SETTLE_SECONDS, GapGuard, HoleWatch
from tests.unit.kafka.consumer_records import PositionsOnly, fetched, tp

REWARDS, NODES = Partition("rewards.v1", 0), Partition("nodes.v1", 0)
NOW = 1_000_000.0
FRESH = int(NOW * 1000)


def offsets(records: object) -> list[int]:
    return [record.offset for record in records]  # type: ignore[attr-defined]


def test_records_without_a_gap_are_all_ready() -> None:
    ready, again = GapGuard().ready(REWARDS, 3, [fetched(3), fetched(4)], NOW)
    assert (offsets(ready), again) == ([3, 4], None)


def test_a_young_gap_holds_back_what_stands_behind_it() -> None:
    guard = GapGuard()
    records = [fetched(3, timestamp=FRESH), fetched(5, timestamp=FRESH)]
    ready, again = guard.ready(REWARDS, 3, records, NOW)
    assert (offsets(ready), again) == ([3], 4)
    assert guard.is_waiting


def test_a_gap_that_fills_is_forgotten_and_no_hole() -> None:
    guard = GapGuard()
    guard.ready(REWARDS, 4, [fetched(5, timestamp=FRESH)], NOW)
    ready, again = guard.ready(REWARDS, 4, [fetched(4, timestamp=FRESH), fetched(5, timestamp=FRESH)], NOW)
    assert (offsets(ready), again) == ([4, 5], None)
    assert not guard.is_waiting
    assert guard.holes == 0


def test_a_gap_before_an_old_record_is_a_hole_at_once() -> None:
    guard = GapGuard()
    ready, again = guard.ready(REWARDS, 3, [fetched(5, timestamp=FRESH - 60_000)], NOW)
    assert (offsets(ready), again) == ([5], None)
    assert guard.holes == 1


def test_a_gap_is_a_hole_after_a_while_whatever_the_clocks_say() -> None:
    guard = GapGuard()
    record = fetched(5, timestamp=FRESH + 3_600_000)
    assert guard.ready(REWARDS, 3, [record], NOW)[1] == 3
    assert guard.ready(REWARDS, 3, [record], NOW + SETTLE_SECONDS / 2)[1] == 3
    assert guard.ready(REWARDS, 3, [record], NOW + SETTLE_SECONDS)[1] is None


def test_compacted_topics_have_gaps_by_nature() -> None:
    ready, again = GapGuard().ready(NODES, 0, [fetched(7, timestamp=FRESH)], NOW)
    assert (offsets(ready), again) == ([7], None)


def test_partitions_that_went_away_wait_for_nothing() -> None:
    guard = GapGuard()
    guard.ready(REWARDS, 3, [fetched(5, timestamp=FRESH)], NOW)
    guard.forget([REWARDS])
    assert not guard.is_waiting


def test_empty_answers_in_a_row_make_a_hole() -> None:
    consumer, watch = PositionsOnly(), HoleWatch()
    found = []
    for poll in range(1, 7):
        consumer.polls[tp()] = poll
        found.append(watch.at_hole(consumer, {tp()}))
    assert found[:3] == [set()] * 3
    assert found[-1] == {tp()}


def test_the_same_answer_counts_once_and_records_begin_anew() -> None:
    consumer, watch = PositionsOnly(), HoleWatch()
    consumer.polls[tp()] = 1
    assert not any(watch.at_hole(consumer, {tp()}) for _ in range(10))
    for poll in range(2, 30):
        consumer.polls[tp()] = poll
        watch.records_came()
        assert not watch.at_hole(consumer, {tp()})
