"""The apps of the streams: what each subscribes to and how it commits."""

import pytest
from faststream import AckPolicy

from polar.kafka.stage import StageApp
from polar.settings import LogSettings, PackerSettings, StreamSettings
from schemas.topics import TOPIC_OF, TopicSpec
from streams import grouper, packer, stitcher

LOG = LogSettings(bootstrap_servers="127.0.0.1:1", topic_prefix="run7")


def _apps() -> dict[str, StageApp]:
    return {
        "stitcher": stitcher.create_app(LOG, StreamSettings()),
        "grouper": grouper.create_app(LOG, StreamSettings()),
        "packer": packer.create_app(LOG, PackerSettings()),
    }


READS = {
    "stitcher": {"run7.calls.v1"},
    "grouper": {"run7.group-events.v1", "run7.trajectories.v1", "run7.rewards.v1"},
    "packer": {"run7.groups.v1", "run7.batches.v1", "run7.policies.v1"},
}
WRITES = {
    "stitcher": {"Trajectory", "SessionAbandoned"},
    "grouper": {"ScoredGroup", "GroupSealed"},
    "packer": {"BatchManifest", "PackedRow"},
}


@pytest.mark.parametrize("name", READS)
async def test_one_batch_subscriber_over_all_topics(name: str) -> None:
    app = _apps()[name]
    assert app.broker is not None
    (subscriber,) = app.broker.subscribers
    assert {topic.name for topic in subscriber.topics} == READS[name]
    assert subscriber.group_id == f"run7.{name}"
    assert subscriber.ack_policy is AckPolicy.MANUAL


def test_every_topic_of_the_flow_has_its_stage() -> None:
    """What one stage writes is read by the next, by itself, or by the trainer and the scheduler."""
    read = set().union(*READS.values())
    for kinds in WRITES.values():
        for kind in kinds:
            topic: TopicSpec = next(spec for model, spec in TOPIC_OF.items() if model.__name__ == kind)
            assert topic.named("run7") in read
