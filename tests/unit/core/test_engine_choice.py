"""Laws of the choice of an engine."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from polar.core.engine_choice import choose_engine

LOADS = st.dictionaries(
    st.sampled_from([f"engine-{number}" for number in range(6)]),
    st.integers(min_value=0, max_value=50),
    min_size=1,
)


@given(LOADS, st.text(max_size=8))
def test_a_session_begins_where_the_load_is_below_its_bound(loads: dict[str, int], session: str) -> None:
    chosen = choose_engine(session, loads)
    assert chosen in loads
    if len(loads) > 1:
        assert loads[chosen] < 1.25 * (sum(loads.values()) + 1) / len(loads)
    assert choose_engine(session, dict(reversed(loads.items()))) == chosen


@given(LOADS, st.text(max_size=8), st.data())
def test_a_session_stays_until_its_engine_has_far_more_than_its_share(
    loads: dict[str, int], session: str, data: st.DataObject
) -> None:
    mine = data.draw(st.sampled_from(sorted(loads)))
    chosen = choose_engine(session, loads, mine)
    share = (sum(loads.values()) + 1) / len(loads)
    if loads[mine] < 2.5 * share or len(loads) == 1:
        assert chosen == mine
    else:
        assert chosen != mine
    assert choose_engine(session, loads, "engine-that-went") == choose_engine(session, loads)


def test_sessions_spread_and_only_those_of_a_lost_engine_move() -> None:
    sessions = [f"task/{number}/0/1" for number in range(300)]
    three = dict.fromkeys(("a", "b", "c"), 0)
    before = {session: choose_engine(session, three) for session in sessions}
    counts = Counter(before.values())
    assert set(counts) == set(three)
    assert min(counts.values()) > 60
    after = {session: choose_engine(session, {"a": 0, "b": 0}) for session in sessions}
    assert all(after[session] == engine for session, engine in before.items() if engine != "c")


def test_sessions_that_begin_together_do_not_pile_up() -> None:
    loads = dict.fromkeys(("a", "b", "c", "d"), 0)
    for number in range(100):
        loads[choose_engine(f"task/{number}/0/1", loads)] += 1
    assert max(loads.values()) <= 32
