"""The generated contracts are current, valid and complete."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from schemas import export
from schemas.services import SERVICES
from schemas.topics import DEAD_LETTERS, TOPIC_OF, TOPICS

HISTORY = Path(export.__file__).with_name("history")


def test_generated_files_are_current() -> None:
    assert export.stale() == [], "run `make schemas` and commit the result"


def test_check_fails_on_a_missing_a_changed_and_a_foreign_file(tmp_path: Path) -> None:
    export.write(tmp_path)
    assert export.stale(tmp_path) == []
    (tmp_path / "Reward.schema.json").unlink()
    (tmp_path / "Trajectory.schema.json").write_text("{}")
    (tmp_path / "Old.schema.json").write_text("{}")
    reasons = export.stale(tmp_path)
    assert [reason.split(":")[0] for reason in reasons] == [
        "Old.schema.json",
        "Reward.schema.json",
        "Trajectory.schema.json",
    ]
    export.write(tmp_path)
    assert export.stale(tmp_path) == []


@pytest.mark.parametrize("model", export.VALUES, ids=lambda model: model.__name__)
def test_value_schema_is_valid_and_accepts_the_frozen_samples(model: Any) -> None:
    schema = json.loads((export.GENERATED / f"{model.__name__}.schema.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in HISTORY.glob(f"{model.__name__}.v{schema_major(model)}*.json"):
        validator.validate(json.loads(path.read_bytes()))


def schema_major(model: Any) -> int:
    return getattr(model, "SCHEMA_MAJOR", 1)


def test_value_schema_refuses_a_value_without_type_and_a_wrong_column() -> None:
    schema = export.value_schema(next(model for model in TOPIC_OF if model.__name__ == "CallRecord"))
    sample = json.loads((HISTORY / "CallRecord.v1.json").read_bytes())
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(sample)
    assert not validator.is_valid({key: value for key, value in sample.items() if key != "type"})
    assert not validator.is_valid({**sample, "sampled_ids": 7})
    assert not validator.is_valid({**sample, "seq": 0})


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [ref for item in value.values() for ref in references(item)]
    if isinstance(value, list):
        return [ref for item in value for ref in references(item)]
    return []


def test_asyncapi_has_every_topic_and_every_reference_resolves() -> None:
    document = json.loads((export.GENERATED / "asyncapi.json").read_bytes())
    assert document["asyncapi"] == "3.0.0"
    assert [channel["address"] for channel in document["channels"].values()] == [t.name for t in TOPICS]
    targets = references(document)
    assert targets
    for target in targets:
        at: Any = document
        for part in target.removeprefix("#/").split("/"):
            at = at[part]


def test_asyncapi_says_who_writes_and_who_reads() -> None:
    operations = json.loads((export.GENERATED / "asyncapi.json").read_bytes())["operations"]
    assert operations["gateway.writes.calls"]["action"] == "send"
    assert operations["gateway.writes.calls"]["messages"] == [
        {"$ref": f"#/channels/calls.v1/messages/{name}"}
        for name in ("SessionOpened", "CallRecord", "SessionSealed")
    ]
    assert operations["stitcher.reads.calls"]["action"] == "receive"
    assert "gateway.reads.calls" not in operations


def test_every_value_has_a_writer_and_every_topic_a_reader() -> None:
    written = {model for spec in SERVICES.values() for model in spec.writes}
    assert written == set(TOPIC_OF)
    read = [topic for spec in SERVICES.values() for topic in spec.reads]
    unread = [topic.suffix for topic in TOPICS if topic not in read and topic is not DEAD_LETTERS]
    # EngineStates are for people, dashboards and `polar status`: no service decides by them.
    assert unread == ["engines.v1"]


def test_writers_in_the_topics_table_are_those_of_the_services_table() -> None:
    for topic in TOPICS:
        for service, spec in SERVICES.items():
            if service == "reward-program":
                continue
            if any(model in topic.models for model in spec.writes):
                word = {"rollout-api": "rollout API", "node": "node"}.get(service, service)
                if topic.suffix == "rewards.v1":
                    word = "evaluators"
                assert word in topic.written_by, f"{topic.suffix} is written by {service}"
