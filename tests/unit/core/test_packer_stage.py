"""The packer's rules, one a test."""

import json

import pytest

from polar.core.batching import (
    BatchMismatchError,
    BatchRule,
    check_rows,
    rebuild_batch,
    remake_batch,
)
from polar.core.packer_stage import POSITIONS, PackerCore
from polar.core.stitching import stitch
from schemas.base import Event, digest_of
from schemas.batches import BatchManifest, PackedRow
from schemas.groups import ScoredGroup
from schemas.policies import PolicyPublished, PolicyVersion
from schemas.topics import BATCHES, GROUPS, POLICIES
from tests.unit.core.call_records import SessionRecords, interval
from tests.unit.core.feed import Feed
from tests.unit.core.occurrences import live_group

TOPICS = (GROUPS, BATCHES, POLICIES)
RULE = BatchRule(policy="policy", groups_per_batch=2, row_tokens=4, max_staleness=1)


def group(name: str, *, step: int = 1, live: bool = True, policy: str = "policy") -> ScoredGroup:
    trajectories = []
    for member in range(2):
        records = SessionRecords(f"{name}/{member}/0/1")
        records.call([1, 2], [3 + member, 5], policy=interval(step))
        trajectories.append(stitch(records.opened, records.records, records.sealed()))
    made = live_group(*trajectories, group_id=name)
    return made.model_copy(update={"live": live, "policy": policy})


def seal(offset: int, partition: int = 0) -> dict[str, str]:
    return {"seal-partition": str(partition), "seal-offset": str(offset)}


def policy(step: int, name: str = "policy") -> PolicyPublished:
    version = PolicyVersion(lineage="a", step=step)
    return PolicyPublished(policy=name, version=version, weights_path="w", weights_sha256="0")


def the_manifest(events: list[Event]) -> BatchManifest:
    (manifest,) = events
    assert isinstance(manifest, BatchManifest)
    return manifest


def packer() -> Feed:
    return Feed(PackerCore(RULE), *TOPICS)


def read_back(feed: Feed, manifest: BatchManifest, headers: dict[str, str]) -> list[Event]:
    """The manifest and its rows come back from the log; returns what follows the last row."""
    rows = feed(manifest, headers=headers)
    following: list[Event] = []
    for row in rows:
        following = feed(row)
    return following


def test_manifest_first_then_its_rows_when_it_is_read_back() -> None:
    feed = packer()
    assert feed(group("a"), headers=seal(4)) == []
    manifest = the_manifest(feed(group("b"), headers=seal(9)))
    headers = feed.headers[0]
    assert json.loads(headers[POSITIONS]) == {"0": 10}
    assert headers["algorithm"] == manifest.algorithm
    assert (manifest.number, manifest.groups, manifest.live_rollouts) == (0, ("a", "b"), 4)
    rows = feed(manifest, headers=headers)
    check_rows(manifest, [row for row in rows if isinstance(row, PackedRow)])
    assert (feed.committed(GROUPS), feed.committed(BATCHES)) == (0, 0)
    for row in rows:
        feed(row)
    assert (feed.committed(GROUPS), feed.committed(BATCHES)) == (2, 0)


def test_one_batch_at_a_time_in_order_of_arrival() -> None:
    feed = packer()
    names = ["a", "b", "c", "d", "e"]
    manifests = [e for at, name in enumerate(names) for e in feed(group(name), headers=seal(at))]
    first = the_manifest(manifests)
    second = the_manifest(read_back(feed, first, {POSITIONS: '{"0": 2}'}))
    assert (second.number, second.groups) == (1, ("c", "d"))


def test_stale_groups_leave_with_a_reason_and_dead_groups_count() -> None:
    feed = packer()
    for step in (1, 2, 3):
        feed(policy(step))
    feed(group("old", step=1), headers=seal(0))
    feed(group("dead", step=1, live=False), headers=seal(1))
    manifest = the_manifest(feed(group("new", step=2), headers=seal(2)))
    assert [(item.id, item.reason) for item in manifest.excluded] == [("old", "stale")]
    assert (manifest.groups, manifest.live_groups) == (("dead", "new"), ("new",))
    assert manifest.policy_version == PolicyVersion(lineage="a", step=3)
    assert manifest.live_rollouts == 2


def test_a_batch_of_dead_groups_has_a_manifest_and_no_rows() -> None:
    feed = packer()
    feed(group("a", live=False), headers=seal(0))
    manifest = the_manifest(feed(group("b", live=False), headers=seal(1)))
    assert (manifest.row_count, manifest.live_rollouts, manifest.trained_tokens) == (0, 0, 0)
    assert feed(manifest, headers=feed.headers[0]) == []
    assert feed.core.metrics()["batches"] == 1


def test_another_policy_is_left_alone() -> None:
    feed = packer()
    feed(policy(9, "other"))
    feed(group("x", policy="other"), headers=seal(0))
    feed(group("a"), headers=seal(1))
    assert the_manifest(feed(group("b"), headers=seal(2))).policy_version is None


def test_groups_that_are_sent_again_are_duplicates() -> None:
    feed = packer()
    feed(group("a"), headers=seal(0))
    assert feed(group("a"), headers=seal(0)) == []
    manifest = the_manifest(feed(group("b"), headers=seal(1)))
    read_back(feed, manifest, {POSITIONS: '{"0": 2}'})
    feed(group("b"), headers=seal(1))
    assert feed.core.metrics()["duplicates"] == 2


def test_a_group_without_coordinates_is_listed() -> None:
    feed = packer()
    feed(group("a"))
    assert feed.reasons() == ["no_seal_headers"]


def made_batch() -> tuple[BatchManifest, list[PackedRow], dict[str, str]]:
    feed = packer()
    feed(group("a"), headers=seal(0))
    manifest = the_manifest(feed(group("b"), headers=seal(1)))
    headers = feed.headers[0]
    rows = [row for row in feed(manifest, headers=headers) if isinstance(row, PackedRow)]
    assert len(rows) > 1
    return manifest, rows, headers


@pytest.mark.parametrize("there", [0, 1])
def test_a_manifest_without_all_its_rows_is_completed_after_a_restart(there: int) -> None:
    manifest, rows, headers = made_batch()
    feed = Feed(PackerCore(RULE), *TOPICS, zone={"batches.v1": 1 + there})
    assert feed(group("a"), headers=seal(0)) == []
    assert feed(manifest, headers=headers) == []
    for row in rows[:there]:
        assert feed(row) == []
    assert feed(group("b"), headers=seal(1)) == rows[there:]


def test_the_first_manifest_of_a_number_wins_and_the_loser_writes_no_row() -> None:
    mine, other = packer(), packer()
    mine(group("a"), headers=seal(0))
    lost = the_manifest(mine(group("b"), headers=seal(1)))
    other(group("b"), headers=seal(1, partition=1))
    won = the_manifest(other(group("c"), headers=seal(2, partition=1)))
    mine(group("c"), headers=seal(2, partition=1))
    rows = mine(won, headers={POSITIONS: '{"0": 2, "1": 3}'})
    assert {row.batch_number for row in rows if isinstance(row, PackedRow)} == {0}
    check_rows(won, [row for row in rows if isinstance(row, PackedRow)])
    assert mine(lost, headers={POSITIONS: '{"0": 2}'}) == []
    assert mine.core.metrics()["ignored_manifests"] == 1


def test_nothing_is_decided_before_own_batches_were_read() -> None:
    feed = Feed(PackerCore(RULE), *TOPICS, zone=3)
    assert feed(group("a"), headers=seal(0)) == []
    assert feed(group("b"), headers=seal(1)) == []


def test_a_batch_that_this_version_cannot_complete_is_listed_and_nothing_follows() -> None:
    manifest, _, headers = made_batch()
    foreign = manifest.model_copy(update={"rows_digest": "f" * 64, "algorithm": "pack-0"})
    feed = packer()
    feed(foreign, headers=headers)
    for at, name in enumerate("abcd"):
        assert feed(group(name), headers=seal(at)) == []
    assert feed.reasons() == ["batch_mismatch"]


def test_a_batch_is_rebuilt_from_its_groups_or_the_difference_is_named() -> None:
    manifest, rows, _ = made_batch()
    groups = {"a": group("a"), "b": group("b")}
    assert digest_of(*rebuild_batch(manifest, groups)) == digest_of(*rows)
    with pytest.raises(BatchMismatchError, match="groups b are not there"):
        rebuild_batch(manifest, {"a": group("a")})
    with pytest.raises(BatchMismatchError, match="digest"):
        rebuild_batch(manifest, {"a": group("a"), "b": group("b", step=2)})
    with pytest.raises(BatchMismatchError, match="rows"):
        check_rows(manifest, rows[:-1])
    remade, other_rows = remake_batch(manifest, groups, builder="per_request", row_tokens=64)
    assert (remade.number, remade.groups, remade.builder) == (0, ("a", "b"), "per_request")
    assert remade.trained_tokens == manifest.trained_tokens
    check_rows(remade, other_rows)
