"""A log in memory and stages that crash: drives the real cores as the shell does.

`StageRun.step` reads a few records, publishes a prefix of the outputs and may then die before
its commit, so that outputs are at-least-once and state is rebuilt from committed offsets.
"""

from collections.abc import Callable, Sequence
from random import Random

from polar.core.stage import DeadLettered, Emit, LogRecord, Output, Partition, StageCore
from schemas.base import Event, encode
from schemas.codec import decode
from schemas.topics import TOPIC_OF, TopicSpec


class MemoryLog:
    """Topics as lists; every event passes through its bytes."""

    def __init__(self, groups: int = 2, sessions: int = 2) -> None:
        self._counts = {"groups": groups, "sessions": sessions, "one": 1}
        self.partitions: dict[Partition, list[LogRecord]] = {}

    def partitions_of(self, topic: TopicSpec) -> list[Partition]:
        return [Partition(topic.suffix, number) for number in range(self._counts[topic.partitions])]

    def write(self, event: Event, headers: dict[str, str] | None = None) -> LogRecord:
        topic = TOPIC_OF[type(event)]
        key = topic.key_of(event)
        number = sum(key.encode()) % self._counts[topic.partitions]
        records = self.partitions.setdefault(Partition(topic.suffix, number), [])
        read_back = decode(encode(event), topic)
        record = LogRecord(Partition(topic.suffix, number), len(records), key, read_back, headers or {})
        records.append(record)
        return record

    def end(self, partition: Partition) -> int:
        return len(self.partitions.get(partition, ()))

    def of(self, kind: type[Event]) -> list[Event]:
        return [
            record.event
            for records in self.partitions.values()
            for record in records
            if isinstance(record.event, kind)
        ]

    def records(self) -> list[LogRecord]:
        return [record for records in self.partitions.values() for record in records]

    def copied(self, groups: int, sessions: int) -> "MemoryLog":
        """The same log in topics with other partition counts, offsets and interleaving."""
        copy = MemoryLog(groups, sessions)
        for record in self.records():
            copy.write(record.event, dict(record.headers))
        return copy


class StageRun:
    """One stage process after another over a MemoryLog."""

    def __init__(
        self,
        log: MemoryLog,
        make_core: Callable[[], StageCore],
        topics: Sequence[TopicSpec],
        *,
        from_start: Sequence[TopicSpec] = (),
    ) -> None:
        self.log = log
        self.make_core = make_core
        self.partitions = [p for topic in topics for p in log.partitions_of(topic)]
        self.from_start = {topic.suffix for topic in from_start}
        self.committed: dict[Partition, int] = {}
        self.dead: list[DeadLettered] = []
        self.crashes = 0
        self.start(0.0)

    def start(self, now: float) -> None:
        """A new process: empty memory, positions from the commits."""
        self.core = self.make_core()
        self.position = {
            partition: 0 if partition.topic in self.from_start else self.committed.get(partition, 0)
            for partition in self.partitions
        }
        self.ends = {p: (self.position[p], self.log.end(p)) for p in self.partitions}
        self.core.on_assigned(self.ends)
        self.not_caught_up = set(self.partitions)
        self._publish(self._caught_up(now))

    def _caught_up(self, now: float) -> list[Output]:
        outputs: list[Output] = []
        for partition in sorted(self.not_caught_up):
            if self.position[partition] >= self.ends[partition][1]:
                self.not_caught_up.discard(partition)
                outputs += self.core.on_caught_up(partition, now)
        return outputs

    def _publish(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output, Emit):
                self.log.write(output.event, dict(output.headers))
            else:
                self.dead.append(output)

    @property
    def is_behind(self) -> bool:
        return any(self.position[p] < self.log.end(p) for p in self.partitions)

    def step(self, random: Random, now: float, *, crash_rate: float = 0.0) -> None:
        """Read some records of one partition, publish, commit; or die in between."""
        ready = [p for p in self.partitions if self.position[p] < self.log.end(p)]
        outputs: list[Output] = []
        if ready:
            partition = random.choice(ready)
            end = min(self.log.end(partition), self.position[partition] + random.randint(1, 4))
            for offset in range(self.position[partition], end):
                outputs += self.core.on_record(self.log.partitions[partition][offset], now)
                self.position[partition] = offset + 1
            outputs += self._caught_up(now)
        if random.random() < 0.5:
            outputs += self.core.on_tick(now)
        if random.random() < crash_rate:
            self._publish(outputs[: random.randint(0, len(outputs))])
            self.crashes += 1
            self.start(now)
            return
        self._publish(outputs)
        if random.random() < 0.5:
            self.commit()

    def commit(self) -> None:
        for partition, offset in self.core.commit_offsets().items():
            assert offset <= self.position[partition], "a commit never passes what was read"
            if partition.topic not in self.from_start:
                self.committed[partition] = offset


def run_until_quiet(runs: Sequence[StageRun], random: Random, *, crash_rate: float, steps: int) -> float:
    """Let the stages race with crashes, then without any until nothing moves; returns the time."""
    now = 0.0
    for _ in range(steps):
        now += random.random()
        random.choice(runs).step(random, now, crash_rate=crash_rate)
    quiet = 0
    while quiet < 20 * len(runs):
        # Beyond every time-out once all is read, so that what time decides is decided then.
        now += 0.1 if any(run.is_behind for run in runs) else 400.0
        before = len(runs[0].log.records())
        for run in runs:
            run.step(random, now)
        moved = len(runs[0].log.records()) != before or any(run.is_behind for run in runs)
        quiet = 0 if moved else quiet + 1
    return now
