"""decode() fails in one way only, and what it reads it can write again."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import export
from schemas.base import canonical_json, digest, encode
from schemas.codec import UnreadableRecordError, decode
from schemas.rewards import Reward
from schemas.topics import MODEL_OF, REWARDS, TOPIC_OF, TOPICS, TopicSpec

SAMPLES = [
    json.loads(path.read_bytes())
    for path in sorted(Path(export.__file__).with_name("history").glob("*.v1.json"))
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TOPIC = st.sampled_from(TOPICS)


def read_or_refuse(data: bytes | None, topic: TopicSpec) -> None:
    """Any exception but UnreadableRecordError fails the test that calls this."""
    try:
        event = decode(data, topic)
    except UnreadableRecordError:
        return
    written = encode(event)
    assert encode(decode(written, topic)) == written


@given(st.none() | st.binary(), TOPIC)
def test_any_bytes(data: bytes | None, topic: TopicSpec) -> None:
    read_or_refuse(data, topic)


@given(JSON, TOPIC)
def test_any_json(value: Any, topic: TopicSpec) -> None:
    read_or_refuse(json.dumps(value).encode(), topic)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[bytes, TopicSpec]:
    """A frozen sample with one value, at any depth, replaced by any JSON or taken out."""
    sample = json.loads(json.dumps(draw(st.sampled_from(SAMPLES))))
    topic = TOPIC_OF[MODEL_OF[sample["type"]]]
    at: Any = sample
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = draw(st.sampled_from(keys))
        child = at[key]
        if isinstance(child, (dict, list)) and child and draw(st.booleans()):
            at = child
            continue
        if draw(st.booleans()):
            del at[key]
        else:
            at[key] = draw(JSON)
        return json.dumps(sample).encode(), topic


@given(mutated())
def test_any_mutation_of_a_real_record(case: tuple[bytes, TopicSpec]) -> None:
    read_or_refuse(*case)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "not_json"),
        (b"", "not_json"),
        (b"\xff\xfe\x00", "not_json"),
        (b"[1]", "not_json"),
        (b"[" * 100_000, "not_json"),
        (b'{"type": "Reward", "value": NaN}', "not_json"),
        (b"{}", "unknown_type"),
        (b'{"type": ["Reward"]}', "unknown_type"),
        (b'{"type": "Surprise"}', "unknown_type"),
        (b'{"type": "Trajectory"}', "wrong_topic"),
        (b'{"type": "Reward", "schema_version": 2}', "schema_version"),
        (b'{"type": "Reward", "schema_version": "1"}', "schema_version"),
        (b'{"type": "Reward"}', "invalid"),
    ],
)
def test_each_way_to_fail_has_its_reason(data: bytes | None, reason: str) -> None:
    with pytest.raises(UnreadableRecordError) as caught:
        decode(data, REWARDS)
    assert caught.value.reason == reason


def reward(**details: Any) -> Reward:
    return Reward(
        reward_id="r",
        session_id="t/0/0/1",
        group_id="t",
        name="outcome",
        value=1.0,
        evaluator="e",
        details=details,
    )


def test_half_a_surrogate_pair_can_be_written_and_read() -> None:
    event = reward(text="\ud83d ä")
    assert decode(encode(event), REWARDS) == event
    encode(event).decode("utf-8")


def test_non_finite_floats_are_written_as_text() -> None:
    assert json.loads(canonical_json({"a": [float("nan"), float("inf")], "b": -float("inf"), "c": 1.5})) == {
        "a": ["NaN", "Infinity"],
        "b": "-Infinity",
        "c": 1.5,
    }


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_encoding_does_not_depend_on_the_order_of_keys(value: dict[str, Any]) -> None:
    backwards = dict(reversed(value.items()))
    assert canonical_json(value) == canonical_json(backwards)


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_digests_count_the_borders_of_their_parts(left: list[bytes], right: list[bytes]) -> None:
    assert (digest(*left) == digest(*right)) == (left == right)
