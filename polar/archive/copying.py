"""Copies an archive into topics, also with other partition counts.

Keys decide the new partitions, and records of one key keep their order, since a key's records
lie on one partition of the archive. Offsets change; nothing that digests cover holds one.
"""

from itertools import islice
from pathlib import Path

from polar.archive.folder import DOWNSTREAM_FIRST, Told, read_raw
from polar.kafka.records import RawRecord
from polar.kafka.topics import ensure_topics
from polar.kafka.writer import LogWriter
from polar.settings import LogSettings

_IN_FLIGHT = 500


async def copy_into_topics(folder: Path, settings: LogSettings, *, told: Told) -> None:
    """Create the topics of `settings` and write every archived record into them.

    The topics must be new: a copy on top of records is a log of two runs. Raises SettingsError
    when they exist with other partition counts, LogUnavailableError.
    """
    await ensure_topics(settings)
    async with LogWriter(settings) as writer:
        # Upstream first: whoever follows the copy finds causes before effects.
        for topic in reversed(DOWNSTREAM_FIRST):
            records = read_raw(folder, topic)
            count = 0
            while chunk := list(islice(records, _IN_FLIGHT)):
                await writer.write_many_raw(topic, [_as_written(record) for record in chunk])
                count += len(chunk)
            told(topic.suffix, count)


def _as_written(record: RawRecord) -> tuple[bytes | None, bytes | None, dict[str, bytes]]:
    return record.key, record.value, {name: value.encode() for name, value in record.headers.items()}
