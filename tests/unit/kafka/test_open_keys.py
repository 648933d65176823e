"""OpenKeys: what may be committed, stated against a model that keeps everything."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.core.open_keys import OpenKeys, TooManyOpenKeysError
from polar.core.stage import LogRecord, Partition
from schemas.rewards import Reward

A, B = Partition("calls.v1", 0), Partition("calls.v1", 1)
EVENT = Reward(reward_id="r", session_id="s", group_id="g", name="n", value=0.0, evaluator="e")


def record(partition: Partition, offset: int) -> LogRecord:
    return LogRecord(partition, offset, "k", EVENT)


def assigned(max_open: int = 100, ends: Mapping[Partition, tuple[int, int]] | None = None) -> OpenKeys:
    keys = OpenKeys(max_open)
    keys.assigned(ends or {A: (0, 10), B: (0, 10)})
    return keys


def test_without_open_keys_the_next_record_is_committed() -> None:
    keys = assigned()
    keys.seen(record(A, 4))
    assert keys.commit_offsets() == {A: 5, B: 0}


def test_an_open_key_holds_its_opening_record_until_it_is_closed() -> None:
    keys = assigned()
    keys.open("one", record(A, 2))
    for offset in range(2, 9):
        keys.seen(record(A, offset))
    assert keys.commit_offsets()[A] == 2
    assert keys.close("one")
    assert keys.commit_offsets()[A] == 9


def test_the_first_opening_wins() -> None:
    keys = assigned()
    assert keys.open("one", record(A, 2))
    assert not keys.open("one", record(A, 5))
    keys.seen(record(A, 5))
    assert keys.commit_offsets()[A] == 2


def test_a_key_holds_records_of_other_partitions_too() -> None:
    keys = assigned()
    keys.open("one", record(A, 1))
    keys.hold("one", B, 3)
    keys.hold("one", B, 5)
    keys.seen(record(B, 7))
    assert keys.commit_offsets()[B] == 3
    keys.close("one")
    assert keys.commit_offsets()[B] == 8


def test_a_record_that_waits_for_its_key_is_held_without_an_open_key() -> None:
    keys = assigned()
    keys.hold("unknown", A, 4)
    keys.seen(record(A, 6))
    assert len(keys) == 0
    assert not keys.is_open("unknown")
    assert keys.commit_offsets()[A] == 4
    assert not keys.close("unknown")
    assert keys.commit_offsets()[A] == 7


def test_the_table_is_bounded_and_names_the_oldest() -> None:
    keys = assigned(max_open=2)
    keys.open("one", record(A, 0))
    keys.open("two", record(A, 1))
    assert keys.is_full
    assert keys.oldest() == "one"
    with pytest.raises(TooManyOpenKeysError, match="three"):
        keys.open("three", record(A, 2))
    keys.close("one")
    assert keys.oldest() == "two"
    assert keys.open("three", record(A, 2))


def test_one_key_that_stays_open_does_not_make_memory_grow() -> None:
    keys = assigned()
    keys.open("for ever", record(A, 0))
    for offset in range(1, 20_000):
        keys.open(str(offset), record(A, offset))
        keys.close(str(offset))
    assert sum(len(heap) for heap in keys._heaps.values()) < 200
    assert len(keys._needs) == 1


def test_revoked_partitions_take_their_keys_with_them() -> None:
    keys = assigned()
    keys.open("of a", record(A, 1))
    keys.open("of b", record(B, 1))
    keys.hold("of b", A, 2)
    assert keys.revoked([A]) == ["of a"]
    assert list(keys) == ["of b"]
    assert keys.commit_offsets() == {B: 0}
    keys.assigned({A: (7, 9)})
    assert keys.commit_offsets() == {A: 7, B: 0}


def test_the_catch_up_zone_ends_where_the_partition_ended_at_assignment() -> None:
    keys = assigned(ends={A: (3, 6)})
    assert keys.in_catch_up_zone(record(A, 5))
    assert not keys.in_catch_up_zone(record(A, 6))
    assert not keys.is_caught_up(A)
    keys.seen(record(A, 5))
    assert keys.is_caught_up(A)
    assert assigned(ends={A: (4, 4)}).is_caught_up(A)


@dataclass
class Model:
    """The same, by looking at everything every time."""

    following: dict[Partition, int] = field(default_factory=lambda: {A: 0, B: 0})
    needs: dict[str, set[tuple[Partition, int]]] = field(default_factory=dict)

    def commit_offsets(self) -> dict[Partition, int]:
        held = [need for needs in self.needs.values() for need in needs]
        return {
            partition: min([following, *(offset for where, offset in held if where == partition)])
            for partition, following in self.following.items()
        }


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "hold", "close", "seen"]),
        st.sampled_from("abcde"),
        st.sampled_from([A, B]),
        st.integers(0, 3),
    ),
    max_size=120,
)


@given(STEPS)
def test_commits_are_those_of_the_model_at_every_step(
    steps: list[tuple[str, str, Partition, int]],
) -> None:
    keys, model, opened = assigned(), Model(), set()
    for step, key, partition, back in steps:
        offset = model.following[partition]
        if step == "seen":
            keys.seen(record(partition, offset))
            model.following[partition] += 1
        elif step == "open":
            if keys.open(key, record(partition, offset)):
                model.needs.setdefault(key, set()).add((partition, offset))
                opened.add(key)
        elif step == "hold":
            keys.hold(key, partition, max(0, offset - back))
            model.needs.setdefault(key, set()).add((partition, max(0, offset - back)))
        else:
            assert keys.close(key) == (key in opened)
            model.needs.pop(key, None)
            opened.discard(key)
        assert keys.commit_offsets() == model.commit_offsets()
        assert set(keys) == opened
