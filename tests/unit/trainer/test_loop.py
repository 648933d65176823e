"""The trainer service against a log in memory: lineages, restarts, interrupted publications."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import pytest

from polar.core.stage import LogRecord, Partition
from polar.errors import LogUnavailableError, SettingsError
from polar.settings import LogSettings, TrainerSettings
from polar.trainer import batch_source, loop
from polar.trainer.offline import train_offline
from polar.weight_folder import weights_digest
from schemas.base import Event
from schemas.policies import PolicyPublished, PolicyVersion
from schemas.topics import BATCHES, POLICIES, TOPIC_OF, TopicSpec
from tests.unit.trainer.hand_batches import batch

pytestmark = pytest.mark.torch


class FakeLog:
    """Two topics in lists; `refusals` writes fail first."""

    def __init__(self) -> None:
        self.topics: dict[str, list[Event]] = {BATCHES.suffix: [], POLICIES.suffix: []}
        self.refusals = 0
        self.follow_starts: list[int] = []
        self.is_followed = asyncio.Event()

    @property
    def policies(self) -> list[PolicyPublished]:
        return [event for event in self.topics[POLICIES.suffix] if isinstance(event, PolicyPublished)]

    def add_batches(self, *batches: tuple[Any, Any]) -> None:
        for manifest, rows in batches:
            self.topics[BATCHES.suffix] += [manifest, *rows]

    def _record(self, topic: str, offset: int) -> LogRecord:
        return LogRecord(Partition(topic, 0), offset, "policy", self.topics[topic][offset])

    async def read_all(self, _: LogSettings, topic: TopicSpec) -> list[LogRecord]:
        return [self._record(topic.suffix, i) for i in range(len(self.topics[topic.suffix]))]

    async def end_offsets(self, _: LogSettings, topic: TopicSpec) -> dict[Partition, int]:
        return {Partition(topic.suffix, 0): len(self.topics[topic.suffix])}

    async def follow(
        self, _: LogSettings, topic: TopicSpec, *, start: dict[Partition, int]
    ) -> AsyncIterator[LogRecord]:
        at = start[Partition(topic.suffix, 0)]
        self.follow_starts.append(at)
        self.is_followed.set()
        while True:
            if at == len(self.topics[topic.suffix]):
                await asyncio.sleep(0.01)
                continue
            yield self._record(topic.suffix, at)
            at += 1

    def writer(self, _: LogSettings) -> "FakeLog":
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def write(self, event: Event) -> None:
        if self.refusals:
            self.refusals -= 1
            raise LogUnavailableError("no broker")
        self.topics[TOPIC_OF[type(event)].suffix].append(event)


@pytest.fixture
def fake_log(monkeypatch: pytest.MonkeyPatch) -> FakeLog:
    log = FakeLog()
    monkeypatch.setattr(loop, "read_all", log.read_all)
    monkeypatch.setattr(loop, "LogWriter", log.writer)
    monkeypatch.setattr("polar.kafka.outages.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(batch_source, "follow", log.follow)
    monkeypatch.setattr(batch_source, "end_offsets", log.end_offsets)
    return log


@pytest.fixture
def run(settings: TrainerSettings, tmp_path: Path):
    async def start(max_steps: int, **changes: Any) -> None:
        changed = settings.model_copy(update={"max_steps": max_steps, **changes})
        await loop.serve(LogSettings(data_dir=tmp_path), changed)

    return start


def folders(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "trainer" / "policies").iterdir()}


async def test_each_batch_becomes_a_version_with_its_weights(fake_log: FakeLog, run, tmp_path: Path) -> None:
    fake_log.add_batches(batch(0, 1), batch(1, 2, 3))
    await run(2)
    start, first, second = fake_log.policies
    lineage = start.version.lineage
    assert [e.version.step for e in fake_log.policies] == [0, 1, 2]
    assert {e.version.lineage for e in fake_log.policies} == {lineage}
    assert (start.parent, first.parent, second.parent) == (None, start.version, first.version)
    assert [e.batch_number for e in fake_log.policies] == [-1, 0, 1]
    assert len({e.weights_sha256 for e in fake_log.policies}) == 3
    assert folders(tmp_path) == {f"{lineage}-1", f"{lineage}-2"}
    for event in (first, second):
        assert weights_digest(Path(event.weights_path)) == event.weights_sha256
        assert event.canary is not None
        assert event.metrics["trained_tokens"] > 0
    assert {"loss", "grad_norm", "reward_mean", "step_seconds", "staleness_mean"} <= first.metrics.keys()


async def test_a_batch_without_live_groups_is_a_version_of_the_same_weights(
    fake_log: FakeLog, run, tmp_path: Path
) -> None:
    fake_log.add_batches(batch(0), batch(1, 1), batch(2), batch(3), batch(4))
    await run(5)
    events = fake_log.policies
    assert [e.version.step for e in events] == [0, 1, 2, 3, 4, 5]
    assert [e.metrics.get("no_op") for e in events] == [None, 1.0, 0.0, 1.0, 1.0, 1.0]
    paths = [e.weights_path for e in events]
    assert paths[0] == paths[1]
    assert paths[2] == paths[3] == paths[4] == paths[5] != paths[1]
    assert events[1].weights_sha256 == events[0].weights_sha256
    assert folders(tmp_path) == {Path(paths[0]).name, Path(paths[5]).name}


async def test_a_restart_claims_a_lineage_and_takes_the_steps_of_an_uninterrupted_run(
    fake_log: FakeLog, run, settings: TrainerSettings
) -> None:
    batches = [batch(n, 2 * n, 2 * n + 1) for n in range(4)]
    fake_log.add_batches(*batches[:2])
    await run(2)
    fake_log.add_batches(*batches[2:])
    await run(4)
    *_, last, start, third, fourth = fake_log.policies
    assert start.version == PolicyVersion(lineage=start.version.lineage, step=2)
    assert start.version.lineage != last.version.lineage
    assert start.parent == last.version
    assert start.weights_sha256 == last.weights_sha256
    assert (start.batch_number, third.batch_number, fourth.batch_number) == (1, 2, 3)
    assert third.parent == start.version
    offset_of_batch_1 = 1 + len(batches[0][1])
    assert fake_log.follow_starts[-1] == offset_of_batch_1

    offline = train_offline(batches, settings)
    live = [e.metrics for e in fake_log.policies if e.metrics]
    assert [m["loss"] for m in offline] == [m["loss"] for m in live]
    assert [m["grad_norm"] for m in offline] == [m["grad_norm"] for m in live]
    assert not {"gap_tokens", "staleness_mean"} & offline[0].keys()


async def test_another_log_with_other_offsets_is_read_from_its_beginning(fake_log: FakeLog, run) -> None:
    batches = [batch(n, 2 * n, 2 * n + 1) for n in range(3)]
    fake_log.add_batches(*batches[:2])
    await run(2)
    fake_log.topics[BATCHES.suffix].clear()
    fake_log.add_batches(batch(0, 9), *batches[1:])
    await run(3)
    assert fake_log.follow_starts[-1] == 0
    assert fake_log.policies[-1].batch_number == 2


async def test_what_the_checkpoint_holds_and_the_log_does_not_is_published_first(
    fake_log: FakeLog, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_log.add_batches(batch(0, 1), batch(1, 2))
    written = fake_log.write

    async def die_after_two(event: Event) -> None:
        if len(fake_log.policies) == 2:
            raise RuntimeError("killed between checkpoint and publication")
        await written(event)

    monkeypatch.setattr(fake_log, "write", die_after_two)
    with pytest.raises(RuntimeError, match="killed"):
        await run(2)
    assert [e.version.step for e in fake_log.policies] == [0, 1]
    monkeypatch.setattr(fake_log, "write", written)
    await run(2)
    first, *_, finished, start = fake_log.policies
    assert [e.version.step for e in fake_log.policies] == [0, 1, 2, 2]
    assert finished.version.lineage == first.version.lineage != start.version.lineage
    assert finished.metrics["trained_tokens"] > 0
    assert start.parent == finished.version


async def test_weights_that_someone_removed_are_written_again(fake_log: FakeLog, run, tmp_path: Path) -> None:
    import shutil

    fake_log.add_batches(batch(0, 1))
    await run(1)
    await asyncio.to_thread(shutil.rmtree, tmp_path / "trainer" / "policies")
    await run(1)
    start = fake_log.policies[-1]
    assert weights_digest(Path(start.weights_path)) == start.weights_sha256


async def test_data_that_was_moved_is_published_from_where_it_is_now(
    fake_log: FakeLog, settings: TrainerSettings, tmp_path: Path
) -> None:
    fake_log.add_batches(batch(0, 1))
    limited = settings.model_copy(update={"max_steps": 1})
    await loop.serve(LogSettings(data_dir=tmp_path / "old"), limited)
    await asyncio.to_thread((tmp_path / "old").rename, tmp_path / "new")
    await loop.serve(LogSettings(data_dir=tmp_path / "new"), limited)
    before, start = fake_log.policies[-2:]
    assert start.weights_path.startswith(str(tmp_path / "new"))
    assert weights_digest(Path(start.weights_path)) == start.weights_sha256 == before.weights_sha256
    assert not await asyncio.to_thread((tmp_path / "old").exists)


async def test_an_outage_of_the_broker_is_waited_for(fake_log: FakeLog, run) -> None:
    fake_log.refusals = 3
    fake_log.add_batches(batch(0, 1))
    await run(1)
    assert [e.version.step for e in fake_log.policies] == [0, 1]


async def test_sigterm_ends_the_wait_for_a_batch_without_an_error(fake_log: FakeLog, run) -> None:
    service = asyncio.create_task(run(5))
    await fake_log.is_followed.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(20):
        await service
    assert len(fake_log.policies) == 1


async def test_a_trainer_without_a_model_says_what_to_set(fake_log: FakeLog, run) -> None:
    with pytest.raises(SettingsError, match="POLAR_TRAINER_MODEL_PATH"):
        await run(1, model_path=None)


def test_offline_stops_at_max_steps_and_exports(settings: TrainerSettings, tmp_path: Path) -> None:
    limited = settings.model_copy(update={"max_steps": 1})
    steps = train_offline([batch(0, 1), batch(1, 2)], limited, export_to=tmp_path / "final")
    assert [m["batch_number"] for m in steps] == [0.0]
    assert (tmp_path / "final" / "model.safetensors").exists()
