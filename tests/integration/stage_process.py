"""A small stage as a process: `python -m tests.integration.stage_process` (settings by environment).

It reads rewards and writes a GroupSealed for each, so that its output is a function of its input.
A group is open from the reward whose text is `open` to the one whose text is `close`.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping

from polar.core.open_keys import OpenKeys
from polar.core.stage import Emit, LogRecord, Output, Partition
from polar.kafka.stage import run_stage, stage_app
from polar.settings import LogSettings
from schemas.rewards import Reward
from schemas.topics import REWARDS
from tests.integration.log_samples import seal_of


class SealingCore:
    """Seals every reward once per life; commits below open groups."""

    def __init__(self) -> None:
        self.keys = OpenKeys(max_open=1000)

    def on_assigned(self, ends: Mapping[Partition, tuple[int, int]]) -> None:
        self.keys.assigned(ends)

    def on_revoked(self, partitions: Iterable[Partition]) -> None:
        self.keys.revoked(partitions)

    def on_record(self, record: LogRecord, now: float) -> list[Output]:
        event = record.event
        assert isinstance(event, Reward)
        if event.details.get("text") == "open":
            self.keys.open(event.group_id, record)
        if event.details.get("text") == "close":
            self.keys.close(event.group_id)
        self.keys.seen(record)
        return [Emit(seal_of(event))]

    def on_caught_up(self, partition: Partition, now: float) -> list[Output]:
        return []

    def on_tick(self, now: float) -> list[Output]:
        return []

    def commit_offsets(self) -> Mapping[Partition, int]:
        return self.keys.commit_offsets()

    def metrics(self) -> Mapping[str, float]:
        return {"open_keys": float(len(self.keys))}


def main() -> None:
    logging.basicConfig(level="WARNING")
    settings = LogSettings()
    group_id = f"{settings.topic_prefix}.sealing"
    asyncio.run(run_stage(stage_app(settings, SealingCore(), [REWARDS], group_id=group_id, tick_seconds=0.2)))


if __name__ == "__main__":
    main()
