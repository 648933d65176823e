"""The stitcher's rules, one a test."""

from polar.core.stitcher_stage import StitcherCore
from schemas.calls import SessionAbandoned
from schemas.sessions import Outcome
from schemas.topics import CALLS
from schemas.trajectories import Trajectory
from tests.unit.core.call_records import SessionRecords
from tests.unit.core.feed import Feed


def session(number: int = 0, calls: int = 2) -> SessionRecords:
    records = SessionRecords(f"t/{number}/0/1")
    for seq in range(calls):
        records.call([1, 2 + seq], [9], base=seq or None)
    return records


def test_a_session_is_emitted_once_when_it_is_sealed() -> None:
    feed, records = Feed(StitcherCore(), CALLS), session()
    assert feed(records.opened) == []
    assert [feed(record) for record in records.records] == [[], []]
    (trajectory,) = feed(records.sealed())
    assert isinstance(trajectory, Trajectory)
    assert len(trajectory.calls) == trajectory.declared_calls == 2
    assert feed(records.sealed()) == feed(records.abandoned()) == []


def test_commits_stay_at_the_opening_of_the_oldest_open_session() -> None:
    feed, first, second = Feed(StitcherCore(), CALLS), session(0), session(1)
    feed(first.opened)
    feed(second.opened)
    feed(second.sealed(calls=0))
    assert feed.committed(CALLS) == 0
    feed(first.sealed(calls=0))
    assert feed.committed(CALLS) == 4


def test_an_abandoned_session_is_an_infrastructure_error() -> None:
    feed, records = Feed(StitcherCore(), CALLS), session()
    feed(records.opened)
    feed(records.records[0])
    (trajectory,) = feed(records.abandoned())
    assert isinstance(trajectory, Trajectory)
    assert (trajectory.closed_by, trajectory.outcome) == ("abandoned", Outcome.INFRA_ERROR)
    assert trajectory.declared_calls is None
    assert len(trajectory.calls) == 1


def test_late_calls_are_dead_letters_and_duplicates_are_not() -> None:
    feed, records = Feed(StitcherCore(), CALLS), session()
    feed(records.opened)
    feed(records.records[0])
    feed(records.sealed(calls=1))
    feed(records.records[0])
    assert feed.reasons() == []
    feed(records.records[1])
    assert feed.reasons() == ["late_call"]
    assert feed.core.metrics()["duplicates"] == 1


def test_a_call_of_a_session_that_may_be_closed_since_before_the_start_is_only_counted() -> None:
    feed, records = Feed(StitcherCore(), CALLS, zone=1), session()
    feed(records.records[0])
    assert feed.reasons() == []
    assert feed.core.metrics()["closed_before_start"] == 1
    feed(records.records[1])  # above the zone nothing explains it
    assert feed.reasons() == ["late_call"]


def test_an_opening_that_is_sent_again_does_not_open_a_closed_session() -> None:
    feed, records = Feed(StitcherCore(), CALLS), session()
    feed(records.opened)
    feed(records.sealed(calls=0))
    feed(records.opened)
    assert feed.core.metrics()["open_sessions"] == 0


def test_an_idle_session_is_given_up_by_a_record_that_is_obeyed_when_read_back() -> None:
    feed, records = Feed(StitcherCore(idle_seconds=10), CALLS), session()
    feed(records.opened, now=0)
    feed(records.records[0], now=5)
    assert feed.tick(14.9) == []
    (abandoned,) = feed.tick(15)
    assert isinstance(abandoned, SessionAbandoned)
    assert feed.tick(100) == [], "asked once"
    feed(records.records[1], now=101)  # still before the record on the log
    (trajectory,) = feed(abandoned, now=102)
    assert isinstance(trajectory, Trajectory)
    assert len(trajectory.calls) == 2
    assert feed.core.metrics()["open_sessions"] == 0


def test_memory_is_flat_when_many_sessions_never_end() -> None:
    feed = Feed(StitcherCore(max_open_sessions=50, idle_seconds=1e9), CALLS)
    for number in range(2000):
        records = session(number, calls=1)
        feed(records.opened)
        feed(records.records[0])
        if number % 10 >= 3:
            feed(records.sealed())
        for abandoned in feed.tick(1.0):
            feed(abandoned)
        assert feed.core.metrics()["open_sessions"] <= 51
    emitted = [event for event in feed.written if isinstance(event, Trajectory)]
    assert len(emitted) == 2000 - feed.core.metrics()["open_sessions"]


def test_beyond_twice_the_limit_sessions_are_refused_by_name() -> None:
    feed = Feed(StitcherCore(max_open_sessions=1), CALLS)
    for number in range(3):
        feed(session(number).opened)
    assert feed.reasons() == ["too_many_open_sessions"]


def test_nothing_is_given_up_before_the_catch_up_zone_was_read() -> None:
    core = StitcherCore(max_open_sessions=1, idle_seconds=1)
    feed = Feed(core, CALLS, zone=4)
    feed(session(0).opened)
    feed(session(1).opened)
    assert feed.tick(100) == []
    feed(session(0).sealed(calls=0))
    feed(session(1).sealed(calls=0))
    assert feed.tick(200) == []


def test_revoked_partitions_are_forgotten() -> None:
    feed, records = Feed(StitcherCore(), CALLS), session()
    feed(records.opened)
    feed.core.on_revoked(list(feed.core.commit_offsets()))
    assert feed.core.metrics()["open_sessions"] == 0
    assert feed.core.commit_offsets() == {}
