"""The log of a capture: one segment file in a folder that becomes an archive.

Invariant: what is acknowledged is on the disk. Until the folder is closed it has no manifest and
counts as no archive.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from polar.archive.folder import ArchiveManifest, claim, write_manifest
from polar.archive.segments import SegmentWriter
from polar.core.stage import Partition
from polar.kafka.records import RawRecord
from schemas.base import Event
from schemas.topics import CALLS, NODES, TopicSpec

_CALLS = Partition(CALLS.suffix, 0)


class FileLog:
    """Stands in for LogWriter in a gateway's sender."""

    def __init__(self, folder: Path) -> None:
        """`folder`: new or empty. Raises SettingsError."""
        claim(folder)
        self._folder = folder
        self._segment = SegmentWriter(folder, _CALLS)
        self._next_offset = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def write(self, event: Event) -> tuple[Partition, int]:
        """Heartbeats: nobody reads them here."""
        del event
        return Partition(NODES.suffix, 0), 0

    async def write_many_raw(
        self, topic: TopicSpec, records: Sequence[tuple[bytes | None, bytes | None, Mapping[str, bytes]]]
    ) -> list[tuple[Partition, int]]:
        """Append records of the calls topic."""
        if topic is not CALLS:
            raise ValueError(f"a capture keeps {CALLS.suffix}, not {topic.suffix}")
        now = int(time.time() * 1000)
        places = []
        for key, value, headers in records:
            texts = {name: text.decode() for name, text in headers.items()}
            self._segment.append(RawRecord(_CALLS, self._next_offset, key, value, texts, now))
            places.append((_CALLS, self._next_offset))
            self._next_offset += 1
        await asyncio.to_thread(self._segment.sync)
        return places

    def close(self) -> ArchiveManifest:
        """Make the folder an archive."""
        segment = self._segment.close()
        manifest = ArchiveManifest(
            topic_prefix="polar",
            session_partitions=1,
            group_partitions=1,
            segments=() if segment is None else (segment,),
        )
        write_manifest(self._folder, manifest)
        return manifest
