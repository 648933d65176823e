"""Laws of the deterministic ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import ids

TASK = st.from_regex(ids.TASK_ID_PATTERN, fullmatch=True)
COUNT = st.integers(0, 10**9)


@given(TASK, COUNT, COUNT, COUNT)
def test_session_id_round_trip(task: str, member: int, attempt: int, epoch: int) -> None:
    session = ids.session_id(task, member, attempt, epoch)
    assert ids.parse_session_id(session) == (task, member, attempt, epoch)
    assert ids.group_of(session) == task


@given(st.tuples(TASK, COUNT, COUNT, COUNT, COUNT), st.tuples(TASK, COUNT, COUNT, COUNT, COUNT))
def test_ids_of_different_things_differ(
    left: tuple[str, int, int, int, int], right: tuple[str, int, int, int, int]
) -> None:
    a, b = (ids.call_id(ids.session_id(*parts[:4]), parts[4]) for parts in (left, right))
    assert (a == b) == (left == right)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a/1/2",
        "a/1/2/3/4",
        "a/x/2/3",
        "/1/2/3",
        "-a/1/2/3",
        "a b/1/2/3",
        "a/1/2/3\n",
        "a/1/2/٣",
        "a/01/2/3",
    ],
)
def test_other_texts_are_no_session_ids(text: str) -> None:
    with pytest.raises(ValueError, match="task/member/attempt/epoch"):
        ids.parse_session_id(text)


@given(st.text())
def test_parse_refuses_or_inverts(text: str) -> None:
    try:
        parts = ids.parse_session_id(text)
    except ValueError:
        return
    assert ids.parse_session_id(ids.session_id(*parts)) == parts


@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4))
def test_derived_ids_count_the_borders_of_their_parts(left: list[str], right: list[str]) -> None:
    assert (ids.derived_id("k", *left) == ids.derived_id("k", *right)) == (left == right)
