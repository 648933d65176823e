"""Fsyncs are shared, and answers end on whichever comes first, disk or log."""

import asyncio
import threading
from pathlib import Path

import pytest

from polar.gateway import sender
from polar.gateway.sender import _FEW_RECORDS
from polar.gateway.syncing import SharedSync
from schemas.calls import CallRecord, SessionSealed
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.running import RunningGateway, eventually, question, running_gateway


class Disk:
    """Counts fsyncs and, while the gate is closed, takes for ever."""

    def __init__(self) -> None:
        self.begun = 0
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def sync(self) -> None:
        self.begun += 1
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error


async def test_who_asks_while_one_runs_shares_the_next() -> None:
    disk = Disk()
    syncs = SharedSync(disk.sync)
    disk.gate.clear()
    first = syncs.ask()
    await eventually(lambda: disk.begun == 1)
    later = [syncs.ask() for _ in range(5)]
    later[0].cancel()
    disk.gate.set()
    await asyncio.wait_for(asyncio.gather(first, *later[1:]), 10)
    assert disk.begun == 2
    await asyncio.wait_for(syncs.ask(), 10)
    assert disk.begun == 3
    await syncs.close()


async def test_a_disk_that_refuses_says_so_to_all_and_is_asked_again() -> None:
    disk = Disk()
    syncs = SharedSync(disk.sync)
    disk.error = OSError(5, "no disk")
    assert {
        str(error) for error in await asyncio.gather(syncs.ask(), syncs.ask(), return_exceptions=True)
    } == {"[Errno 5] no disk"}
    disk.error = None
    await asyncio.wait_for(syncs.ask(), 10)
    await syncs.close()


async def test_what_is_no_fault_of_the_disk_is_told_too_and_the_next_one_is_done() -> None:
    disk = Disk()
    syncs = SharedSync(disk.sync)
    disk.error = ValueError("a mistake")
    with pytest.raises(ValueError, match="a mistake"):
        await asyncio.wait_for(syncs.ask(), 10)
    disk.error = None
    await asyncio.wait_for(syncs.ask(), 10)
    await syncs.close()


async def test_waiting_for_an_fsync_of_others_is_short() -> None:
    disk = Disk()
    syncs = SharedSync(disk.sync)
    await syncs.let_go_first(60)  # none runs
    disk.gate.clear()
    answer = syncs.ask()
    await asyncio.wait_for(syncs.let_go_first(0.01), 5)
    assert not answer.done()
    waiting = asyncio.create_task(syncs.let_go_first(60))
    disk.gate.set()
    await asyncio.wait_for(waiting, 5)
    await syncs.close()


@pytest.fixture
async def both(engine: FakeEngine, tmp_path: Path):
    """A gateway whose answers end on the disk or the log, with a grace that no test waits for."""
    async with running_gateway(
        tmp_path, engine.url, durable_on="disk_or_log", broker_grace_ms=60_000
    ) as gateway:
        yield gateway


def slow(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    disk.gate.clear()
    monkeypatch.setattr(gateway.parts.spool._journal, "fsync", disk.sync)
    return disk


async def test_an_answer_ends_on_the_disk_while_the_broker_is_slow(both: RunningGateway) -> None:
    key = await both.open()
    both.log.gate.clear()
    async with asyncio.timeout(10):
        assert (await both.chat(key))[0] == 200
        assert (await both.stream(key))[-1] == "[DONE]"
    assert both.log.calls() == []
    assert both.parts.metrics()["durable_records_by_arrival_total"] == {"on_disk": 2}
    both.log.gate.set()
    assert await both.seal() == 2
    assert [record.seq for record in both.log.calls()] == [1, 2]


async def test_an_answer_ends_on_the_log_while_the_disk_is_slow(
    both: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await both.open()
    disk = slow(both, monkeypatch)
    async with asyncio.timeout(10):
        assert (await both.chat(key))[0] == 200
    assert [record.seq for record in both.log.calls()] == [1]
    assert both.parts.metrics()["durable_records_by_arrival_total"] == {"on_log": 1}
    disk.gate.set()


async def test_a_disk_that_refuses_is_no_failure_when_the_broker_takes_the_record(
    both: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await both.open()
    disk = slow(both, monkeypatch)
    disk.error = OSError(5, "no disk")
    disk.gate.set()
    async with asyncio.timeout(10):
        assert (await both.chat(key))[0] == 200
    assert disk.begun == 1


async def test_an_answer_waits_while_neither_has_its_record(
    both: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await both.open()
    disk = slow(both, monkeypatch)
    both.log.gate.clear()
    call = asyncio.create_task(both.chat(key))
    await eventually(lambda: disk.begun == 1)
    await asyncio.sleep(0.1)
    assert not call.done()
    disk.gate.set()
    assert (await asyncio.wait_for(call, 10))[0] == 200
    both.log.gate.set()


async def test_with_many_records_under_way_answers_wait_for_the_log_alone(
    both: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await both.open()
    disk = Disk()
    monkeypatch.setattr(both.parts.spool._journal, "fsync", disk.sync)
    both.log.gate.clear()
    for number in range(_FEW_RECORDS):
        assert (await both.chat(key, question(str(number))))[0] == 200
    assert disk.begun == _FEW_RECORDS
    call = asyncio.create_task(both.chat(key, question("one more")))
    await eventually(lambda: both.parts.spool.num_records == _FEW_RECORDS + 1)
    await asyncio.sleep(0.1)
    assert (call.done(), disk.begun) == (False, _FEW_RECORDS)
    both.log.gate.set()
    assert (await asyncio.wait_for(call, 10))[0] == 200


async def test_records_that_nobody_waits_for_go_together(
    both: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_GATHER_SECONDS", 60)
    keys = [await both.open(f"task/{number}/0/1") for number in range(3)]
    both.log.batches.clear()
    for key in keys:
        assert (await both.chat(key))[0] == 200
    assert both.log.batches == []
    # A seal is waited for, and what lies before it goes at once.
    assert await asyncio.wait_for(both.seal("task/0/0/1"), 10) == 1
    assert [type(event) for event in both.log.batches[0]] == [CallRecord] * 3
    assert isinstance(both.log.batches[1][0], SessionSealed)
