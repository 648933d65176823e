"""Branches and kinds of a session's tree, and the causes of its splits by harness and model."""

from collections import Counter

from hypothesis import given

from polar.core.cause_counts import count_causes
from polar.core.prefix_tree import TreePaths
from polar.core.stitching import stitch
from polar.core.tree_outline import KINDS, causes_of, kind_of, outline
from schemas.calls import Delivery
from schemas.trajectories import Trajectory
from tests.property.session_scripts import LAWS, Script, scripts
from tests.unit.core.call_records import SessionRecords

HARNESS = {"native_ids": {"harness": "codex_cli_rs"}, "model_asked": "gpt-x"}


def session() -> SessionRecords:
    """A main chain of two calls, a sub-agent, a summary, an aborted call and a title."""
    records = SessionRecords("t/0/0/1")
    records.call([1, 2], [3, 4], **HARNESS)
    records.call([1, 2, 3, 4, 5], [6], base=1, **HARNESS)
    records.call([9, 9, 9], [7, 7], kind="subagent", thread_id="sub", **HARNESS)
    records.call([1, 2, 8], [8, 8, 8], kind="compaction", model_asked="gpt-x")
    records.call([1, 2, 3, 4, 5, 6, 5], [5, 5], base=2, delivery=Delivery.CLIENT_ABORTED, **HARNESS)
    records.call([6], [1], kind="auxiliary", **HARNESS)
    return records


def trajectory() -> Trajectory:
    records = session()
    return stitch(records.opened, records.records, records.sealed())


def test_each_token_of_the_tree_is_of_one_kind() -> None:
    found = outline(trajectory())
    assert found.by_kind == {
        "context": 2 + 1 + 3 + 1 + 1 + 1, "agent": 3, "subagent": 2, "compaction": 3, "untrainable": 2,
        "auxiliary": 1,
    }  # fmt: skip
    assert found.unique_tokens == sum(found.by_kind.values()) == 20
    assert found.naive_tokens == 4 + 6 + 5 + 6 + 9 + 2
    assert [branch.depth for branch in found.branches] == [0, 2, 2, 0, 0]
    assert {call.seq: branch.parent for branch in found.branches for call in branch.calls} == {
        1: 0, 2: 0, 3: -1, 4: 0, 5: 0, 6: -1,
    }  # fmt: skip


def test_a_token_that_a_usable_call_sampled_is_trained_whoever_else_sampled_it() -> None:
    records = SessionRecords()
    records.call([1], [2, 3], delivery=Delivery.CLIENT_ABORTED)
    records.call([1], [2, 4], kind="subagent")
    found = outline(stitch(records.opened, records.records, records.sealed()))
    assert found.by_kind == {"context": 1, "subagent": 2, "untrainable": 1}


def test_a_kind_of_a_later_version_is_no_error() -> None:
    made = trajectory()
    odd = made.calls[0].model_copy(update={"kind": "critic"})
    assert outline(made.model_copy(update={"calls": (odd, *made.calls[1:])})).by_kind["untrainable"] == 4


def test_causes_are_counted_once_a_call_by_harness_and_model() -> None:
    records = session()
    sealed = stitch(records.opened, records.records, records.sealed())
    codex, other = count_causes([*records.records, *records.records], [sealed])
    assert (codex.harness, codex.model, codex.calls, codex.usable) == ("codex_cli_rs", "gpt-x", 5, 3)
    assert (codex.extending, codex.causes) == (2, Counter({"subagent": 1}))
    assert (other.harness, other.model, other.calls, other.causes) == (
        "",
        "gpt-x",
        1,
        Counter({"compaction": 1}),
    )


@LAWS
@given(scripts())
def test_an_outline_agrees_with_plain_loops(script: Script) -> None:
    made = stitch(script.records.opened, script.records.records, script.closing)
    paths = TreePaths(made.tree)
    kinds: dict[tuple[int, ...], tuple[bool, int, str]] = {}
    for call in made.calls:
        path = paths.path(call.end_run, call.end_offset).tolist()
        for size in range(1, len(path) + 1):
            sampled = size > call.prompt_tokens
            entry = (
                (call.untrainable is not None, call.seq, kind_of(call))
                if sampled
                else (True, 10**9, "context")
            )
            here = kinds.get(tuple(path[:size]))
            kinds[tuple(path[:size])] = entry if here is None else min(here, entry)
    found = outline(made)
    assert found.by_kind == dict(Counter(kind for _, _, kind in kinds.values()))
    assert set(found.by_kind) <= set(KINDS)
    assert sum(branch.tokens for branch in found.branches) == len(kinds)
    placed = [call for branch in found.branches for call in branch.calls]
    assert sorted([*placed, *found.unplaced], key=lambda call: call.seq) == list(made.calls)
    causes = [cause for call in made.calls for cause in {split.cause for split in call.splits}]
    assert causes_of(made.calls) == Counter(causes)
