"""Batches out of a log with everything that at-least-once delivery puts there."""

import random

import pytest

from polar.errors import TrainerError
from polar.trainer.batch_source import BatchAssembler, batches_from_events
from schemas.base import Event
from schemas.columns import FloatColumn
from tests.unit.trainer.hand_batches import batch

pytestmark = pytest.mark.torch


def records(number: int, *seeds: int) -> list[Event]:
    manifest, rows = batch(number, *seeds, row_tokens=40)
    return [manifest, *rows]


def numbers(events: list[Event], first: int = 0) -> list[int]:
    return [manifest.number for manifest, _ in batches_from_events(events, first_number=first)]


def test_batches_come_whole_and_in_order() -> None:
    events = records(0, 1) + records(1) + records(2, 2, 3)
    found = list(batches_from_events(events))
    assert [manifest.number for manifest, _ in found] == [0, 1, 2]
    assert [rows for _, rows in found] == [
        batch(0, 1, row_tokens=40)[1],
        (),
        batch(2, 2, 3, row_tokens=40)[1],
    ]


@pytest.mark.parametrize("seed", range(6))
def test_duplicates_and_interleaving_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    parts = [records(0, 1), records(1, 2, 3), records(2), records(3, 4)]
    mixed: list[Event] = []
    for part in parts:
        # after its manifest a row may come any number of times, later than the next manifest too
        rows = [row for row in part[1:] for _ in range(rng.randint(1, 3))]
        for item in [part[0], *rows]:
            position = rng.randint(mixed.index(part[0]) + 1, len(mixed)) if item in part[1:] else len(mixed)
            mixed.insert(position, item)
        mixed.append(part[0])
    expected = list(batches_from_events([item for part in parts for item in part]))
    assert list(batches_from_events(mixed)) == expected


def test_an_incomplete_batch_waits_and_holds_back_later_ones() -> None:
    first, second = records(0, 1), records(1, 2)
    assert len(first) > 2
    assembler = BatchAssembler("policy", 0)
    for event in [*first[:-1], *second]:
        assembler.add(event)
        assert assembler.take() is None
    assembler.add(first[-1])
    taken = [assembler.take(), assembler.take(), assembler.take()]
    assert [b and b.manifest.number for b in taken] == [0, 1, None]


def test_the_first_manifest_of_a_number_counts() -> None:
    first, second = records(0, 1), records(0, 2)
    assert list(batches_from_events([first[0], second[0], *first[1:], *second[1:]])) == list(
        batches_from_events(first)
    )


def test_rows_that_the_manifest_did_not_decide_on_are_an_error() -> None:
    manifest, *rows = records(0, 1)
    other = rows[0].model_copy(update={"advantages": FloatColumn([9.0] * len(rows[0].advantages))})
    with pytest.raises(TrainerError, match="batch 0: its rows have digest"):
        numbers([manifest, other, *rows[1:]])


def test_earlier_batches_and_other_policies_are_passed_over() -> None:
    other = [e.model_copy(update={"policy": "another"}) for e in records(0, 5)]
    events = records(0, 1) + other + records(1, 2) + records(2, 3)
    assert numbers(events, first=1) == [1, 2]
    assembler = BatchAssembler("policy", 2)
    for event in events:
        assembler.add(event)
    assert assembler.ignored == len(records(0, 1)) + len(records(1, 2))


def test_a_log_that_runs_ahead_of_a_missing_row_is_an_error_not_a_leak() -> None:
    assembler = BatchAssembler("policy", 0)
    for event in records(0, 1)[:-1]:
        assembler.add(event)
    for number in range(1, 64):
        assembler.add(batch(number)[0])
    with pytest.raises(TrainerError, match="batch 0 of policy policy is incomplete"):
        assembler.add(batch(64)[0])
