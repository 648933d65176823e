"""An archive gives back the same bytes, and says so when it cannot."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.archive import folder as archive_folder
from polar.archive.digests import recorded_digests
from polar.archive.folder import archive_topics, open_archive, read_events, read_raw
from polar.archive.segments import BrokenSegmentError, read_segment, write_segment
from polar.core.stage import Partition
from polar.errors import SettingsError
from polar.kafka.records import RawRecord
from polar.settings import LogSettings
from schemas.base import encode
from schemas.calls import SessionOpened, SessionSealed
from schemas.sessions import Outcome
from schemas.topics import CALLS, DEAD_LETTERS, TOPICS

CALLS_0 = Partition(CALLS.suffix, 0)


def opened(name: str) -> bytes:
    return encode(SessionOpened(session_id=f"{name}/0/0/1", group_id=name, gateway_id="gateway-0"))


def record(offset: int, value: bytes | None, *, partition: Partition = CALLS_0, **headers: str) -> RawRecord:
    return RawRecord(partition, offset, b"key", value, headers, 1_700_000_000_000 + offset)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.none() | st.binary(max_size=200),
            st.none() | st.binary(max_size=2000),
            st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3),
            st.integers(-1, 2**62),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_records_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, rows) -> None:
    records = [
        RawRecord(CALLS_0, offset, key, value, headers, timestamp)
        for offset, (key, value, headers, timestamp) in enumerate(rows, start=5)
    ]
    place = tmp_path_factory.mktemp("segments")
    segment = write_segment(place, CALLS_0, records)
    assert (segment.first_offset, segment.last_offset) == (5, 4 + len(rows))
    assert list(read_segment(place, segment)) == records


def test_a_changed_a_cut_and_a_missing_file_are_told(tmp_path: Path) -> None:
    segment = write_segment(tmp_path, CALLS_0, [record(0, b"x" * 100)])
    path = tmp_path / segment.file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(BrokenSegmentError, match="digest"):
        list(read_segment(tmp_path, segment))
    path.unlink()
    with pytest.raises(BrokenSegmentError, match="missing"):
        list(read_segment(tmp_path, segment))


class Topics:
    """Stands in for the broker: records by topic."""

    def __init__(self, **by_suffix: list[RawRecord]) -> None:
        self.by_suffix = by_suffix
        self.order: list[str] = []

    async def read_all_raw(self, _: LogSettings, topic) -> list[RawRecord]:
        self.order.append(topic.suffix)
        return self.by_suffix.get(topic.suffix, [])


async def archived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topics: Topics) -> Path:
    monkeypatch.setattr(archive_folder, "read_all_raw", topics.read_all_raw)
    monkeypatch.setattr(archive_folder, "SEGMENT_RECORDS", 2)
    place = tmp_path / "archive"
    await archive_topics(LogSettings(topic_prefix="mine"), place, told=lambda *_: None)
    return place


async def test_a_run_is_archived_topic_by_topic_in_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Partition(CALLS.suffix, 3)
    calls = [record(offset, opened(f"t{offset}"), colour="red") for offset in (0, 1, 4)]
    calls.append(record(0, b"no event", partition=other))
    topics = Topics(**{CALLS.suffix: calls})
    place = await archived(tmp_path, monkeypatch, topics)
    manifest = open_archive(place)
    assert (manifest.topic_prefix, manifest.records, manifest.counts()[CALLS.suffix]) == ("mine", 4, 4)
    assert [(s.partition, s.first_offset, s.last_offset) for s in manifest.segments] == [
        (0, 0, 1), (0, 4, 4), (3, 0, 0),
    ]  # fmt: skip
    assert list(read_raw(place, CALLS)) == calls
    # The unreadable record is in the archive, byte for byte, and is no event.
    assert [item.offset for item in read_events(place, CALLS)] == [0, 1, 4]
    assert read_events(place, DEAD_LETTERS) == []


async def test_topics_are_copied_downstream_first_and_none_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a copied record was made from is then in the archive too, though the run goes on."""
    topics = Topics()
    await archived(tmp_path, monkeypatch, topics)
    assert sorted(topics.order) == sorted(topic.suffix for topic in TOPICS)
    chain = ["batches.v1", "groups.v1", "group-events.v1", "trajectories.v1", "calls.v1", "tasks.v1"]
    assert [suffix for suffix in topics.order if suffix in chain] == chain


async def test_an_archive_is_never_written_over_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await archived(tmp_path, monkeypatch, Topics())
    with pytest.raises(SettingsError, match="not empty"):
        await archived(tmp_path, monkeypatch, Topics())


def test_a_folder_without_a_manifest_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="polar archive"):
        open_archive(tmp_path)


async def test_a_segment_with_fewer_records_than_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = await archived(tmp_path, monkeypatch, Topics(**{CALLS.suffix: [record(0, opened("t"))]}))
    manifest = open_archive(place)
    short = replace(manifest, segments=(replace(manifest.segments[0], records=2),))
    monkeypatch.setattr(archive_folder, "open_archive", lambda _: short)
    with pytest.raises(BrokenSegmentError, match="manifest says 2"):
        list(read_raw(place, CALLS))


def test_digests_cover_the_first_of_each_id_in_order_of_ids() -> None:
    sealed = SessionSealed(session_id="t/0/0/1", group_id="t", calls=0, outcome=Outcome.COMPLETED)
    assert recorded_digests([sealed]) == recorded_digests([])
