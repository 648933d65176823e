"""I1 to I5 over generated sessions, against plain nested loops."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from polar.core.packing import pack
from polar.core.prefix_tree import PrefixTree, TreePaths
from polar.core.session_log import SessionLog, SessionSnapshot
from polar.core.stitching import stitch
from schemas.base import digest_of, encode
from schemas.batches import Builder
from schemas.calls import CallRecord, MediaPart, PromptDelta
from schemas.columns import TokenColumn
from schemas.trajectories import Trajectory, UsabilityRules
from schemas.trees import StitchedCall
from tests.property.session_scripts import LAWS, Script, scripts
from tests.unit.core.call_records import SessionRecords
from tests.unit.core.occurrences import Occurrence, live_group, trained_in

BUILDERS: list[Builder] = ["per_request", "prefix_merging", "prefix_tree"]


def stitched(script: Script) -> Trajectory:
    return stitch(script.records.opened, script.records.records, script.closing)


def oracle(script: Script, trajectory: Trajectory) -> Counter[Occurrence]:
    """What must be trained, from the records alone and the list of untrainable calls."""
    expected: Counter[Occurrence] = Counter()
    reasons = {call.seq: call.untrainable for call in trajectory.calls}
    for record in script.records.records:
        if reasons[record.seq] is not None:
            continue
        prompt = script.records.prompts[record.seq]
        sampled = record.sampled_ids.tolist()
        for index, logprob in enumerate(record.logprobs.tolist()):
            if math.isfinite(logprob) and -9999 < logprob <= 0:
                prefix = (*prompt, *sampled[:index])
                expected[record.call_id, index, prefix, sampled[index], logprob] += 1
    return expected


@LAWS
@given(scripts())
def test_every_usable_token_is_trained_once_under_its_exact_prefix(script: Script) -> None:
    trajectory = stitched(script)
    expected = oracle(script, trajectory)
    for builder in BUILDERS:
        packed = pack([live_group(trajectory)], builder=builder, row_tokens=256, policy="p", batch_number=0)
        assert trained_in(packed.rows) == expected
        assert packed.trained_tokens == sum(expected.values())


@LAWS
@given(scripts())
def test_nothing_vanishes_and_the_tree_is_the_set_of_sequences(script: Script) -> None:
    trajectory = stitched(script)
    assert [call.seq for call in trajectory.calls] == [record.seq for record in script.records.records]
    paths = TreePaths(trajectory.tree)
    for call in trajectory.calls:
        assert paths.path(call.end_run, call.end_offset).tolist() == script.records.paths[call.seq]
        assert call.prompt_tokens == len(script.records.prompts[call.seq])
    prefixes = {
        tuple(path[:size]) for path in script.records.paths.values() for size in range(1, len(path) + 1)
    }
    assert len(trajectory.tree.tokens) == len(prefixes)


@LAWS
@given(scripts(), st.randoms())
def test_order_and_duplicates_of_records_change_nothing(script: Script, random) -> None:
    records = [*script.records.records]
    random.shuffle(records)
    again = stitch(script.records.opened, records, script.closing)
    assert digest_of(again) == digest_of(stitched(script))


def _usable(trajectory: Trajectory) -> list[StitchedCall]:
    return [call for call in trajectory.calls if call.untrainable is None]


def _common(left: list[int], right: list[int]) -> int:
    size = 0
    while size < min(len(left), len(right)) and left[size] == right[size]:
        size += 1
    return size


@LAWS
@given(scripts())
def test_extends_and_splits_agree_with_nested_loops(script: Script) -> None:
    usable = _usable(stitched(script))
    for position, call in enumerate(usable):
        prompt = script.records.prompts[call.seq]
        earlier = [(other.seq, script.records.paths[other.seq]) for other in usable[:position]]
        whole = [(len(path), seq) for seq, path in earlier if prompt[: len(path)] == path]
        assert call.extends == (max(whole)[1] if whole else None)
        shared = max(((_common(path, prompt), seq) for seq, path in earlier), default=None)
        if shared is None or (whole and max(whole)[0] == shared[0]):
            assert call.splits == ()
        else:
            assert [(split.index, split.against) for split in call.splits] == [shared]


@LAWS
@given(st.lists(scripts(), min_size=1, max_size=3))
def test_merging_keeps_every_path(sessions: list[Script]) -> None:
    tree, placed = PrefixTree(), []
    trajectories = [stitched(script) for script in sessions]
    for trajectory in trajectories:
        there = tree.insert_tree(trajectory.tree)
        placed.append([there.locate(call.end_run, call.end_offset, tree) for call in trajectory.calls])
    exported = tree.export()
    paths = TreePaths(exported.tree)
    for script, trajectory, ends in zip(sessions, trajectories, placed, strict=True):
        for call, end in zip(trajectory.calls, ends, strict=True):
            assert paths.path(*exported.locate(end)).tolist() == script.records.paths[call.seq]


@LAWS
@given(scripts(), st.data())
def test_a_missing_base_marks_its_calls_and_no_other(script: Script, data: st.DataObject) -> None:
    records: SessionRecords = script.records
    if not records.records:
        return
    gone = data.draw(st.sampled_from([record.seq for record in records.records]))
    kept = [record for record in records.records if record.seq != gone]
    trajectory = stitch(records.opened, kept, records.sealed())
    lost = {gone}
    for record in kept:
        if record.prompt.base_call in lost:
            lost.add(record.seq)
    for call in trajectory.calls:
        assert (call.untrainable == "missing_base") == (call.seq in lost)
    assert [item.id for item in trajectory.listed] == [f"{records.session_id}#{gone}"]
    paths = TreePaths(trajectory.tree)
    for call in trajectory.calls:
        if call.seq not in lost:
            assert paths.path(call.end_run, call.end_offset).tolist() == records.paths[call.seq]


def feed(log: SessionLog, records: list[CallRecord]) -> SessionLog:
    for record in records:
        log.add(record)
    return log


@LAWS
@given(scripts(), st.randoms(), st.data())
def test_a_snapshot_at_any_point_changes_nothing(script: Script, random, data: st.DataObject) -> None:
    records = [*script.records.records, *script.records.records[:2]]
    random.shuffle(records)
    at = data.draw(st.integers(0, len(records)))
    before = feed(SessionLog(script.records.opened), records[:at])
    written = encode(before.snapshot())
    restored = SessionLog.restore(SessionSnapshot.model_validate_json(written))
    assert encode(restored.snapshot()) == written
    through = feed(restored, records[at:]).close(script.closing)
    assert digest_of(through) == digest_of(stitched(script))
    assert digest_of(feed(before, records[at:]).close(script.closing)) == digest_of(through)


@LAWS
@given(st.lists(scripts(), min_size=2, max_size=3), st.randoms())
def test_interleaved_sessions_and_duplicates_give_the_same_trajectories(
    sessions: list[Script], random
) -> None:
    """Each session's opening comes first and its closing last; everything else in any order."""
    logs: dict[int, SessionLog] = {at: SessionLog(each.records.opened) for at, each in enumerate(sessions)}
    arriving = [(at, record) for at, each in enumerate(sessions) for record in each.records.records * 2]
    random.shuffle(arriving)
    for at, record in arriving:
        logs[at].add(record)
    for at, script in enumerate(sessions):
        assert digest_of(logs[at].close(script.closing)) == digest_of(stitched(script))


@LAWS
@given(scripts(), st.data())
def test_pictures_part_equal_ids_and_nothing_else_changes(script: Script, data: st.DataObject) -> None:
    """Every token of a whole prompt stands for a drawn picture: paths agree where ids and pictures do."""
    rules = UsabilityRules(trains_media=True)
    records, symbols = [], {}
    for record in script.records.records:
        prompt = script.records.prompts[record.seq]
        shown = [data.draw(st.sampled_from(["", "", "cat", "dog"])) for _ in prompt]
        media = tuple(MediaPart(position=at, digest=name) for at, name in enumerate(shown) if name)
        whole = PromptDelta(new_ids=TokenColumn(prompt))
        records.append(record.model_copy(update={"prompt": whole, "media": media}))
        path = script.records.paths[record.seq]
        symbols[record.seq] = [*zip(path, [*shown, *[""] * len(record.sampled_ids)], strict=True)]
    trajectory = stitch(script.records.opened, records, script.closing, rules)
    prefixes = {tuple(path[:size]) for path in symbols.values() for size in range(1, len(path) + 1)}
    assert len(trajectory.tree.tokens) == len(prefixes)
    paths, usable = TreePaths(trajectory.tree), _usable(trajectory)
    for position, call in enumerate(usable):
        assert paths.path(call.end_run, call.end_offset).tolist() == script.records.paths[call.seq]
        prompt = symbols[call.seq][: call.prompt_tokens]
        earlier = [(other.seq, symbols[other.seq]) for other in usable[:position]]
        whole = [(len(path), seq) for seq, path in earlier if prompt[: len(path)] == path]
        assert call.extends == (max(whole)[1] if whole else None)
