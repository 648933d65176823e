"""Every record ever frozen in schemas/history stays readable by today's models.

`<Model>.v<major>.json` is the first sample of a major version. Where an optional field is
added, `<Model>.v<major>.<n>.json` (n = 2, 3, …) is frozen beside it: the newest sample of a
model encodes to exactly itself, older ones lose nothing.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from schemas import export
from schemas.base import canonical_json, encode
from schemas.codec import UnreadableRecordError, decode
from schemas.topics import MODEL_OF, TOPIC_OF, TOPICS

HISTORY = Path(export.__file__).with_name("history")
SAMPLES = sorted(HISTORY.glob("*.json"))
NAME = re.compile(r"^(?P<model>\w+)\.v(?P<major>\d+)(\.(?P<minor>\d+))?\.json$")


def version(path: Path) -> tuple[str, int, int]:
    match = NAME.match(path.name)
    assert match, f"{path.name} is not <Model>.v<major>[.<n>].json"
    return match["model"], int(match["major"]), int(match["minor"] or 1)


def newest() -> dict[str, Path]:
    return {version(path)[0]: path for path in sorted(SAMPLES, key=version)}


def load(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_bytes())
    assert isinstance(value, dict)
    return value


def covers(larger: Any, smaller: Any) -> bool:
    """Whether everything in `smaller` stands in `larger` too; fields may have been added."""
    if isinstance(smaller, dict):
        return isinstance(larger, dict) and all(
            key in larger and covers(larger[key], item) for key, item in smaller.items()
        )
    if isinstance(smaller, list):
        return (
            isinstance(larger, list)
            and len(larger) == len(smaller)
            and all(covers(a, b) for a, b in zip(larger, smaller, strict=True))
        )
    return bool(larger == smaller)


def test_every_model_of_the_table_has_a_sample() -> None:
    assert {model.__name__ for model in TOPIC_OF} == set(newest())


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_sample_is_readable_and_nothing_of_it_is_lost(path: Path) -> None:
    name, major, _ = version(path)
    sample = load(path)
    model = MODEL_OF[name]
    assert sample["type"] == name
    assert sample["schema_version"] == major
    event = decode(canonical_json(sample), TOPIC_OF[model])
    assert type(event) is model
    assert covers(json.loads(encode(event)), sample)


@pytest.mark.parametrize("path", newest().values(), ids=lambda path: path.name)
def test_newest_sample_encodes_to_the_same_bytes(path: Path) -> None:
    sample = load(path)
    topic = TOPIC_OF[MODEL_OF[sample["type"]]]
    written = canonical_json(sample)
    assert encode(decode(written, topic)) == written, (
        f"{sample['type']} got a field: copy {path.name} to the next minor number and add it there"
    )


@pytest.mark.parametrize("path", newest().values(), ids=lambda path: path.name)
def test_unknown_fields_are_ignored(path: Path) -> None:
    sample = load(path)
    topic = TOPIC_OF[MODEL_OF[sample["type"]]]
    extended = canonical_json({**sample, "of_a_later_version": {"deep": [1, None]}})
    assert decode(extended, topic) == decode(canonical_json(sample), topic)


@pytest.mark.parametrize("path", newest().values(), ids=lambda path: path.name)
def test_a_newer_major_version_is_refused_by_name(path: Path) -> None:
    sample = load(path)
    model = MODEL_OF[sample["type"]]
    newer = canonical_json({**sample, "schema_version": model.SCHEMA_MAJOR + 1})
    with pytest.raises(UnreadableRecordError, match=model.__name__) as caught:
        decode(newer, TOPIC_OF[model])
    assert caught.value.reason == "schema_version"


@pytest.mark.parametrize("path", newest().values(), ids=lambda path: path.name)
def test_a_record_on_another_topic_is_refused(path: Path) -> None:
    sample = load(path)
    own = TOPIC_OF[MODEL_OF[sample["type"]]]
    for topic in TOPICS:
        if topic is not own:
            with pytest.raises(UnreadableRecordError) as caught:
                decode(canonical_json(sample), topic)
            assert caught.value.reason == "wrong_topic"
