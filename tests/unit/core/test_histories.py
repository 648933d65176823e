"""Message histories from deltas, and what two of them share."""

from typing import Any

from polar.core.histories import Histories
from tests.unit.core.call_records import SessionRecords


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def histories(*deltas: tuple[int | None, int, list[str]]) -> Histories:
    """Of calls 1, 2, …: (base, kept messages, texts of new ones)."""
    session = SessionRecords()
    for base, kept, texts in deltas:
        record = session.call([1], [2], messages=[user(text) for text in texts])
        delta = record.messages.model_copy(update={"base_call": base, "kept": kept})
        session.records[-1] = record.model_copy(update={"messages": delta})
    return Histories({record.seq: record for record in session.records})


def test_an_edit_on_the_way_bounds_what_two_histories_share() -> None:
    of = histories((None, 0, ["a", "b", "c"]), (1, 1, ["x", "c", "d"]), (2, 4, ["e"]), (1, 3, ["f"]))
    assert of.of(3) == [user(text) for text in "axcde"]
    assert (of.shared(2, 1), of.shared(3, 1), of.shared(3, 2)) == (1, 1, 4)
    assert of.shared(4, 3) == of.shared(3, 4) == 1
    assert [of.count(seq) for seq in range(1, 5)] == [3, 4, 5, 4]


def test_what_is_not_known_is_not_shared() -> None:
    of = histories((None, 0, ["a"]), (9, 1, ["b"]), (3, 1, ["c"]), (None, 0, ["a"]))
    assert [of.of(seq) for seq in (2, 3)] == [None, None]
    assert (of.shared(2, 1), of.shared(3, 1), of.shared(4, 1)) == (0, 0, 0)
    assert of.first_difference(of.of(1) or [], of.of(4) or []) is None
