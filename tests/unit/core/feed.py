"""Feeds single records to a core, with offsets counted per partition."""

from polar.core.stage import DeadLettered, Emit, LogRecord, Output, Partition, StageCore
from schemas.base import Event
from schemas.topics import TOPIC_OF, TopicSpec


class Feed:
    """One assignment of partition 0 of some topics; `zone`: records that lay there before."""

    def __init__(
        self,
        core: StageCore,
        *topics: TopicSpec,
        zone: int | dict[str, int] = 0,
        starts: dict[str, int] | None = None,
    ) -> None:
        self.core = core
        starts = starts or {}
        self.offsets = {topic.suffix: starts.get(topic.suffix, 0) for topic in topics}
        self.written: list[Event] = []
        self.dead: list[tuple[str, Event]] = []
        zones = zone if isinstance(zone, dict) else dict.fromkeys(self.offsets, zone)
        ends = {
            Partition(suffix, 0): (start, start + zones.get(suffix, 0))
            for suffix, start in self.offsets.items()
        }
        core.on_assigned(ends)
        for partition, (start, end) in ends.items():
            if start == end:
                self._take(core.on_caught_up(partition, 0.0))

    def __call__(
        self, event: Event, *, now: float = 0.0, headers: dict[str, str] | None = None
    ) -> list[Event]:
        """Process one record; returns the events written because of it."""
        topic = TOPIC_OF[type(event)]
        partition = Partition(topic.suffix, 0)
        record = LogRecord(partition, self.offsets[topic.suffix], topic.key_of(event), event, headers or {})
        self.offsets[topic.suffix] += 1
        return self._take(self.core.on_record(record, now))

    def tick(self, now: float) -> list[Event]:
        return self._take(self.core.on_tick(now))

    def caught_up(self, now: float = 0.0) -> list[Event]:
        written: list[Event] = []
        for suffix in self.offsets:
            written += self._take(self.core.on_caught_up(Partition(suffix, 0), now))
        return written

    def committed(self, topic: TopicSpec) -> int | None:
        return self.core.commit_offsets().get(Partition(topic.suffix, 0))

    def reasons(self) -> list[str]:
        return [reason for reason, _ in self.dead]

    def _take(self, outputs: list[Output]) -> list[Event]:
        self.dead += [(o.reason, o.record.event) for o in outputs if isinstance(o, DeadLettered)]
        self.headers = [dict(o.headers) for o in outputs if isinstance(o, Emit)]
        events = [o.event for o in outputs if isinstance(o, Emit)]
        self.written += events
        return events
