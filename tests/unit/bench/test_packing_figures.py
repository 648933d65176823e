"""The packing benchmark's reading of rows: it sees what is not trained, twice, or under another prefix."""

import pytest

from bench.bench_packing import batch, scored, trained
from bench.workloads import GroupLoad, make_group
from schemas.batches import Builder, PackedRow
from schemas.columns import TokenColumn


@pytest.fixture(scope="module")
def load() -> GroupLoad:
    return make_group("polar-swe-drift")


@pytest.fixture(scope="module")
def rows(load: GroupLoad) -> list[PackedRow]:
    return batch([scored(load)], "prefix_tree", 32_768)[1]


@pytest.mark.parametrize("builder", ["per_request", "prefix_merging"])
def test_every_builder_trains_all_of_drifted_input(load: GroupLoad, builder: Builder) -> None:
    found = trained(load, batch([scored(load)], builder, 32_768)[1])
    assert (found["faithful"], found["unfaithful"], found["dropped"]) == (1, 0, 0)


def test_a_tree_trains_all_of_drifted_input_and_what_is_wrong_is_seen(
    load: GroupLoad, rows: list[PackedRow]
) -> None:
    assert trained(load, rows)["faithful"] == 1
    assert trained(load, rows[1:])["dropped"] > 0
    assert trained(load, [*rows, rows[0]])["unfaithful"] > 0
    tokens = rows[0].tokens.tolist()
    tokens[0] += 1
    changed = rows[0].model_copy(update={"tokens": TokenColumn(tokens)})
    assert trained(load, [changed, *rows[1:]])["unfaithful"] > 0
