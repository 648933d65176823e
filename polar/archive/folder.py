"""An archive: a folder of segment files and the manifest that lists them.

Invariant: a folder with a manifest is a whole archive. Topics are copied downstream first
(batches before groups before trajectories before calls), so that everything a copied record was
made from is in the archive too, even when the run went on meanwhile.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

from polar.archive.segments import BrokenSegmentError, Segment, read_segment, write_segment
from polar.core.stage import LogRecord
from polar.errors import SettingsError
from polar.kafka.reader import read_all_raw
from polar.kafka.records import RawRecord, decode_record
from polar.settings import LogSettings
from schemas.codec import UnreadableRecordError
from schemas.topics import (
    BATCHES,
    CALLS,
    DEAD_LETTERS,
    ENGINES,
    GROUP_EVENTS,
    GROUPS,
    NODE_COMMANDS,
    NODES,
    POLICIES,
    REWARDS,
    SESSIONS,
    TASKS,
    TRAJECTORIES,
    TopicSpec,
)

FORMAT = 1
MANIFEST = "manifest.json"
SEGMENT_RECORDS = 20_000

DOWNSTREAM_FIRST: tuple[TopicSpec, ...] = (
    DEAD_LETTERS, ENGINES, POLICIES, BATCHES, GROUPS, GROUP_EVENTS, TRAJECTORIES, REWARDS, CALLS,
    SESSIONS, NODES, NODE_COMMANDS, TASKS,
)  # fmt: skip

Told = Callable[[str, int], None]
"""Told the topic that was copied and its number of records."""


@dataclass(frozen=True, slots=True)
class ArchiveManifest:
    """What an archive holds."""

    topic_prefix: str
    session_partitions: int
    group_partitions: int
    segments: tuple[Segment, ...]
    run_settings: Mapping[str, str] = field(default_factory=dict)
    """POLAR_* variables of the run's services, where they were known."""
    format: int = FORMAT

    @property
    def records(self) -> int:
        """Over all topics."""
        return sum(segment.records for segment in self.segments)

    def counts(self) -> dict[str, int]:
        """Records a topic suffix."""
        counts = {topic.suffix: 0 for topic in DOWNSTREAM_FIRST}
        for segment in self.segments:
            counts[segment.topic] += segment.records
        return counts


async def archive_topics(
    settings: LogSettings, folder: Path, *, told: Told, run_settings: Mapping[str, str] = {}
) -> ArchiveManifest:
    """Copy all topics up to their present ends into a new or empty folder.

    Raises SettingsError when the folder holds something, LogUnavailableError.
    """
    claim(folder)
    segments: list[Segment] = []
    for topic in DOWNSTREAM_FIRST:
        records = await read_all_raw(settings, topic)
        segments += _write(folder, records)
        told(topic.suffix, len(records))
    manifest = ArchiveManifest(
        topic_prefix=settings.topic_prefix,
        session_partitions=settings.session_partitions,
        group_partitions=settings.group_partitions,
        segments=tuple(segments),
        run_settings=dict(run_settings),
    )
    write_manifest(folder, manifest)
    return manifest


def write_manifest(folder: Path, manifest: ArchiveManifest) -> None:
    """Make the folder a whole archive."""
    draft = folder / f"{MANIFEST}.new"
    draft.write_text(json.dumps(asdict(manifest), indent=1) + "\n")
    draft.replace(folder / MANIFEST)


def claim(folder: Path) -> None:
    """Make the folder. Raises SettingsError when it holds something."""
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(f"{folder} is not empty: give a new folder")
    folder.mkdir(parents=True, exist_ok=True)


def open_archive(folder: Path) -> ArchiveManifest:
    """The manifest of an archive. Raises SettingsError when the folder holds none."""
    path = folder / MANIFEST
    if not path.is_file():
        raise SettingsError(f"{folder} is no archive: {MANIFEST} is missing (make one with `polar archive`)")
    value = json.loads(path.read_text())
    if value["format"] != FORMAT:
        raise SettingsError(f"{folder} has archive format {value['format']}, this polar reads {FORMAT}")
    value["segments"] = tuple(Segment(**segment) for segment in value["segments"])
    return ArchiveManifest(**value)


def read_raw(folder: Path, topic: TopicSpec) -> Iterator[RawRecord]:
    """Records of a topic, by partition and offset. Raises BrokenSegmentError."""
    segments = [segment for segment in open_archive(folder).segments if segment.topic == topic.suffix]
    for segment in sorted(segments, key=lambda item: (item.partition, item.first_offset)):
        found = 0
        for record in read_segment(folder, segment):
            found += 1
            yield record
        if found != segment.records:
            raise BrokenSegmentError(f"{segment.file}: {found} records, the manifest says {segment.records}")


def read_events(folder: Path, *topics: TopicSpec) -> list[LogRecord]:
    """Decoded records of topics, in the order of the arguments; unreadable ones are left out."""
    records = []
    for topic in topics:
        for raw in read_raw(folder, topic):
            try:
                records.append(decode_record(raw, topic))
            except UnreadableRecordError:
                continue
    return records


def _write(folder: Path, records: Sequence[RawRecord]) -> list[Segment]:
    segments = []
    for partition, group in groupby(records, key=lambda record: record.partition):
        members = list(group)
        for start in range(0, len(members), SEGMENT_RECORDS):
            segments.append(write_segment(folder, partition, members[start : start + SEGMENT_RECORDS]))  # noqa: PERF401
    return segments
