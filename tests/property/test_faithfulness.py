"""The faithful share, against plain loops, and rows that were tampered with."""

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from polar.core.call_usability import UsabilityRules
from polar.core.faithfulness import faithful_share
from polar.core.packing import pack
from polar.core.stitching import stitch
from schemas.batches import Builder, PackedRow
from schemas.calls import MediaPart
from schemas.columns import TokenColumn
from schemas.groups import ScoredGroup
from tests.property.session_scripts import LAWS
from tests.property.test_packing_laws import expected, groups, packed
from tests.unit.core.call_records import SessionRecords
from tests.unit.core.occurrences import live_group, trained_in

BUILDERS: list[Builder] = ["per_request", "prefix_merging", "prefix_tree"]


@LAWS
@given(groups(), st.sampled_from(BUILDERS), st.sampled_from([5, 9, 64]))
def test_all_that_fits_a_row_is_faithful(made: list[ScoredGroup], builder: Builder, row_tokens: int) -> None:
    fitting, cut = expected(made, row_tokens)
    total = len(fitting) + sum(cut.values())
    share = faithful_share(made, packed(made, builder, row_tokens).rows)
    assert share == pytest.approx(len(fitting) / total if total else 1.0)


@LAWS
@given(groups(), st.sampled_from(BUILDERS), st.data())
def test_a_changed_token_costs_exactly_those_that_see_it(
    made: list[ScoredGroup], builder: Builder, data: st.DataObject
) -> None:
    rows = list(packed(made, builder, 64).rows)
    assume(rows)
    at = data.draw(st.integers(0, len(rows) - 1))
    tokens = rows[at].tokens.tolist()
    position = data.draw(st.integers(0, len(tokens) - 1))
    tokens[position] += 100  # no generated token is so large
    rows[at] = rows[at].model_copy(update={"tokens": TokenColumn(tokens)})
    assert faithful_share(made, rows) == pytest.approx(by_plain_loops(made, rows))


@LAWS
@given(groups(), st.sampled_from(BUILDERS), st.data())
def test_a_row_that_is_lost_or_trained_twice_costs_its_tokens(
    made: list[ScoredGroup], builder: Builder, data: st.DataObject
) -> None:
    rows = list(packed(made, builder, 12).rows)
    assume(rows)
    row = data.draw(st.sampled_from(rows))
    tokens = row.tokens.tolist()
    tampered = row.model_copy(update={"tokens": TokenColumn([tokens[0] + 100, *tokens[1:]])})
    for other in ([*rows, row], [*rows, tampered], [each for each in rows if each is not row]):
        assert faithful_share(made, other) == pytest.approx(by_plain_loops(made, other))
        assert faithful_share(made, other) < faithful_share(made, rows)


def by_plain_loops(made: list[ScoredGroup], rows: list[PackedRow]) -> float:
    wanted, _ = expected(made, 1000)
    found = trained_in(rows)
    times = Counter((call_id, index) for call_id, index, *_ in found.elements())
    return sum(found[each] == 1 == times[each[0], each[1]] for each in wanted) / len(wanted)


def test_a_wrong_target_or_index_is_unfaithful() -> None:
    session = SessionRecords()
    session.call([1, 2], [3, 4, 5])
    group = live_group(stitch(session.opened, session.records, session.sealed()))
    (row,) = pack([group], builder="prefix_tree", row_tokens=16, policy="p", batch_number=0).rows
    assert faithful_share([group], [row]) == 1.0
    for changed in (
        {"targets": TokenColumn([3, 9, 5])},
        {"sources": TokenColumn([1, 1, 3])},
        {"call_indexes": TokenColumn([0, 2, 2])},
        {"call_ids": ("t/9/0/1#1",)},
    ):
        assert faithful_share([group], [row.model_copy(update=changed)]) < 0.7
    assert faithful_share([], [row]) == 1.0


def test_a_branch_that_does_not_see_its_whole_path_is_unfaithful() -> None:
    session = SessionRecords()
    session.call([1, 2, 3], [4, 5])
    session.call([1, 2, 3, 6], [7], base=1)
    group = live_group(stitch(session.opened, session.records, session.sealed()))
    (row,) = pack([group], builder="prefix_tree", row_tokens=16, policy="p", batch_number=0).rows
    assert row.range_starts.tolist() == [0]
    assert faithful_share([group], [row]) == 1.0
    blind = row.model_copy(update={"range_starts": TokenColumn([1])})
    assert faithful_share([group], [blind]) == pytest.approx(2 / 3)


def test_what_follows_a_picture_cannot_be_faithful() -> None:
    session = SessionRecords()
    session.call([1, 2, 3], [4], media=(MediaPart(position=1, digest="a" * 64),))
    session.call([5], [6])
    rules = UsabilityRules(trains_media=True)
    made = stitch(session.opened, session.records, session.sealed(), rules)
    group = live_group(made)
    rows = pack([group], builder="prefix_tree", row_tokens=16, policy="p", batch_number=0).rows
    assert sum(len(row.sources) for row in rows) == 2
    assert faithful_share([group], rows) == 0.5
