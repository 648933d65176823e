"""Pictures in prompts: nodes by digest, a reason where one is missing or cannot be trained."""

from typing import Any

import pytest

from polar.core.stitching import stitch
from schemas.calls import CallRecord, MediaPart
from schemas.columns import TokenColumn
from schemas.trajectories import Trajectory, UsabilityRules
from tests.unit.core.call_records import SessionRecords
from tests.unit.core.occurrences import live_group

PICTURE = 900
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
SHOWN = UsabilityRules(trains_media=True)


def shown(digest: str | None, position: int = 1) -> dict[str, Any]:
    return {"media": (MediaPart(position=position, digest=digest),), "messages": [IMAGE]}


def stitched(session: SessionRecords, rules: UsabilityRules | None = None) -> Trajectory:
    return stitch(session.opened, session.records, session.sealed(), rules)


def reasons(session: SessionRecords, rules: UsabilityRules | None = None) -> list[str | None]:
    return [call.untrainable for call in stitched(session, rules).calls]


def test_equal_placeholders_with_other_pictures_share_no_node() -> None:
    session = SessionRecords()
    session.call([1, PICTURE, 2], [3], **shown("cat"))
    session.call([1, PICTURE, 2], [3], **shown("dog"))
    session.call([1, PICTURE, 2], [4], **shown("cat"))
    trajectory = stitched(session, SHOWN)
    tree = trajectory.tree
    assert tree.tokens.tolist() == [1, PICTURE, 2, 3, 4, PICTURE, 2, 3]
    assert [(each.index, each.digest) for each in tree.media] == [(1, "cat"), (5, "dog")]
    assert [(split.against, split.index) for call in trajectory.calls for split in call.splits] == [
        (1, 1),
        (1, 3),
    ]


def test_a_group_keeps_pictures_apart_and_merges_equal_ones() -> None:
    members = []
    for number, digest in enumerate(("cat", "dog", "cat")):
        session = SessionRecords(f"t/{number}/0/1")
        session.call([1, PICTURE], [3], **shown(digest))
        members.append(stitched(session, SHOWN))
    group = live_group(*members)
    assert group.tree.tokens.tolist() == [1, PICTURE, 3, PICTURE, 3]
    assert [each.digest for each in group.tree.media] == ["cat", "dog"]
    first, second, third = ((call.end_run, call.end_offset) for call in group.calls)
    assert first == third != second


def test_the_trainer_reads_text_only_unless_the_rules_say_otherwise() -> None:
    session = SessionRecords()
    session.call([1, PICTURE], [3], **shown("cat"))
    session.call([1, PICTURE, 3, 4], [5], base=1, messages=[IMAGE])
    session.call([1, 7], [5], base=1)
    assert reasons(session) == ["media_untrained", "media_untrained", None]
    assert reasons(session, SHOWN) == [None, None, None]


@pytest.mark.parametrize(
    "fields", [{"messages": [IMAGE]}, shown(None), shown("cat") | {"messages": [IMAGE, IMAGE]}]
)
def test_a_picture_of_which_nothing_is_known_is_missing(fields: dict[str, Any]) -> None:
    session = SessionRecords()
    session.call([1, PICTURE], [3], **fields)
    assert reasons(session) == reasons(session, SHOWN) == ["media_missing"]


def test_a_position_outside_of_the_new_ids_is_no_record() -> None:
    session = SessionRecords()
    record = session.call([1, PICTURE], [3])
    with pytest.raises(ValueError, match=r"media\.position must lie among prompt\.new_ids"):
        CallRecord.model_validate(record.model_dump() | {"media": [{"position": 2, "digest": "cat"}]})
    kept = record.prompt.model_copy(update={"base_call": 1, "kept": 2, "new_ids": TokenColumn([5])})
    with pytest.raises(ValueError, match=r"media\.position"):
        CallRecord.model_validate(record.model_dump() | {"prompt": kept, "media": [{"position": 1}]})
