"""Laws of THE TABLE."""

import inspect
import pkgutil
from importlib import import_module

import pytest

import schemas
from schemas import topics
from schemas.base import Event
from schemas.topics import DEAD_LETTERS, MODEL_OF, TOPIC_OF, TOPICS, TopicSpec

GROUP_KEYED = {"trajectories.v1", "rewards.v1", "group-events.v1", "groups.v1"}


def event_models() -> set[type[Event]]:
    found: set[type[Event]] = set()
    for module in pkgutil.iter_modules(schemas.__path__):
        for _, value in inspect.getmembers(import_module(f"schemas.{module.name}"), inspect.isclass):
            if issubclass(value, Event) and value is not Event:
                found.add(value)
    return found


def test_every_event_travels_on_exactly_one_topic() -> None:
    travelling = [model for topic in TOPICS for model in topic.models]
    assert len(travelling) == len(set(travelling))
    assert set(travelling) == event_models() == set(TOPIC_OF)


def test_a_type_names_its_model() -> None:
    assert {name: model.__name__ for name, model in MODEL_OF.items()} == {name: name for name in MODEL_OF}
    assert len(MODEL_OF) == len(TOPIC_OF)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.suffix)
def test_key_fields_exist_and_are_text(topic: TopicSpec) -> None:
    for model, field in topic.models.items():
        assert field in model.model_fields, f"{model.__name__} has no field {field}"
        annotation = model.model_fields[field].annotation
        default = model.model_fields[field].default
        assert annotation is str or isinstance(default, str), f"{model.__name__}.{field} is not text"


def test_topics_keyed_by_group_share_the_partition_number() -> None:
    by_group = {t.suffix for t in TOPICS if set(t.models.values()) == {"group_id"}}
    assert by_group == GROUP_KEYED
    assert {t.suffix for t in TOPICS if t.partitions == "groups"} == GROUP_KEYED
    for counts in ((4, 4), (1, 7), (12, 3)):
        numbers = {t.num_partitions(*counts) for t in TOPICS if t.suffix in GROUP_KEYED}
        assert numbers == {counts[1]}


def test_one_partition_topics_are_those_of_single_writers_and_small_tables() -> None:
    assert {t.suffix for t in TOPICS if t.partitions == "one"} == {
        "nodes.v1", "batches.v1", "policies.v1", "engines.v1", "dead-letters.v1",
    }  # fmt: skip


def test_names_are_versioned_and_follow_the_prefix() -> None:
    assert len({t.suffix for t in TOPICS}) == len(TOPICS)
    for topic in TOPICS:
        assert topic.suffix.endswith(".v1")
        assert "_" not in topic.suffix, "Kafka's metrics mix up . and _"
        assert topic.name == f"polar.{topic.suffix}"
        assert topic.named("run-7") == f"run-7.{topic.suffix}"


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.suffix)
def test_configs_follow_what_is_kept(topic: TopicSpec) -> None:
    configs = topic.configs()
    # Brokers count the framing of a batch too; the writer alone enforces max_message_bytes.
    assert topic.max_message_bytes < int(configs["max.message.bytes"]) <= topic.max_message_bytes * 1.1
    if topic.kept == "compacted":
        assert configs["cleanup.policy"] == "compact"
        assert "retention.ms" not in configs
    else:
        assert configs["cleanup.policy"] == "delete"
        assert configs["message.timestamp.type"] == "LogAppendTime"
        assert (configs["retention.ms"] == "-1") == (topic.kept == "forever")


def test_a_dead_letter_fits_whatever_was_refused() -> None:
    assert DEAD_LETTERS.raw
    headers = 64 * 1024
    largest = max(t.max_message_bytes for t in TOPICS if t is not DEAD_LETTERS)
    assert DEAD_LETTERS.max_message_bytes >= largest + headers


def test_key_of_refuses_a_model_of_another_topic() -> None:
    started = topics.SessionStarted(session_id="t/0/0/1", group_id="t", node_id="n")
    assert topics.SESSIONS.key_of(started) == "t/0/0/1"
    with pytest.raises(KeyError):
        topics.CALLS.key_of(started)
