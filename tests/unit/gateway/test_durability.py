"""Nothing is lost and nothing counts twice: spool, seals, restarts, clients that leave."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from polar.errors import SettingsError
from polar.gateway.sender import _until_border
from polar.gateway.spool import Spool, SpooledRecord
from schemas.calls import CallRecord, Delivery, SessionOpened, SessionSealed
from schemas.sessions import Outcome
from tests.unit.gateway.fake_engine import Answer, FakeEngine
from tests.unit.gateway.running import SESSION, FakeLog, RunningGateway, eventually, question, running_gateway


def hanging() -> Answer:
    return Answer(delay_s=60, json={})


async def test_with_the_broker_down_answers_end_on_the_spools_fsync(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await gateway.open()
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), fsync(fd)))
    gateway.log.down = True
    status, _, _ = await gateway.chat(key)
    assert status == 200
    assert synced
    assert (await gateway.stream(key))[-1] == "[DONE]"
    assert await gateway.seal() == 2
    assert gateway.log.calls() == []
    gateway.log.down = False
    await eventually(lambda: gateway.parts.spool.num_records == 0)
    assert [type(event) for event in gateway.log.events] == [
        SessionOpened,
        CallRecord,
        CallRecord,
        SessionSealed,
    ]


async def test_a_broker_that_does_not_answer_costs_the_grace_only(gateway: RunningGateway) -> None:
    key = await gateway.open()
    gateway.log.gate.clear()
    async with asyncio.timeout(10):
        assert (await gateway.chat(key))[0] == 200
    gateway.log.gate.set()


async def test_a_disk_that_refuses_keeps_the_end_of_the_answer_back(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await gateway.open()
    gateway.log.down = True

    def refuse() -> None:
        raise OSError(5, "no disk")

    monkeypatch.setattr(gateway.parts.spool._journal, "fsync", refuse)
    status, body, _ = await gateway.chat(key)
    assert (status, body["error"]["code"]) == (503, "spool_error")
    events = await gateway.stream(key)
    assert events[-1]["error"]["code"] == "spool_error"
    assert not any(choice.get("finish_reason") for event in events[:-1] for choice in event["choices"])
    monkeypatch.undo()


async def test_a_restart_goes_on_where_the_process_died(engine: FakeEngine, tmp_path: Path) -> None:
    """The first gateway is abandoned in the middle of a call with its broker down, as by kill -9:
    its spool is copied while it still runs, which is all that a killed process leaves behind."""
    log = FakeLog()
    async with running_gateway(tmp_path / "a", engine.url, log) as gateway:
        key = await gateway.open()
        await gateway.open("task/1/0/1")
        await gateway.seal("task/1/0/1")
        assert (await gateway.chat(key))[0] == 200
        log.down = True
        assert (await gateway.chat(key, question("second")))[0] == 200
        engine.script = [hanging()]
        dying = asyncio.create_task(gateway.chat(key, question("third", n=2)))
        await eventually(lambda: len(engine.requests) == 3)
        copy_spool(tmp_path / "a", tmp_path / "b")
        dying.cancel()
    seen = list(log.events)

    again = FakeLog()
    async with running_gateway(tmp_path / "b", engine.url, again) as gateway:
        await eventually(lambda: gateway.parts.spool.num_records == 0)
        assert [record.seq for record in again.calls()] == [2, 3, 4]
        dead = again.calls()[1]
        assert dead.delivery is Delivery.CLIENT_ABORTED
        assert dead.error == "gateway restarted"
        assert dead.request_digest == again.calls()[2].request_digest
        assert dead.sampling_used["temperature"] == 1.0
        key = gateway.key()
        assert (await gateway.chat(key, question("second")))[0] == 200
        record = again.calls()[-1]
        assert record.seq == 5
        assert record.prompt.base_call is None  # memory is gone: a whole record
        status, body, _ = await gateway.chat(gateway.key("task/1/0/1"))
        assert (status, body["error"]["code"]) == (401, "session_sealed")
        assert await gateway.seal() == 5
    numbers = [event.seq for event in [*seen, *again.events] if isinstance(event, CallRecord)]
    assert numbers == [1, 2, 3, 4, 5]


async def test_records_that_were_sent_but_not_dropped_are_sent_again_unchanged(
    engine: FakeEngine, tmp_path: Path
) -> None:
    log = FakeLog()
    async with running_gateway(tmp_path / "a", engine.url, log) as gateway:
        key = await gateway.open()
        log.gate.clear()
        await gateway.chat(key)
        copy_spool(tmp_path / "a", tmp_path / "b")
        log.gate.set()
        await eventually(lambda: len(log.calls()) == 1)
    async with running_gateway(tmp_path / "b", engine.url, again := FakeLog()) as gateway:
        await eventually(lambda: gateway.parts.spool.num_records == 0)
    assert again.calls() == log.calls()


def copy_spool(source: Path, target: Path) -> None:
    """The files as they lie on disk now."""
    shutil.copytree(source / "gateway", target / "gateway")


async def test_a_seal_settles_what_is_in_flight_and_cancels_what_does_not_end(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    key = await gateway.open()
    engine.script = [Answer(delay_s=0.1, json=engine.answer({"model": "m", "messages": []})), hanging()]
    calls = [asyncio.create_task(gateway.chat(key, question(text))) for text in ("a", "b")]
    await eventually(lambda: len(engine.requests) == 2)
    sealing = asyncio.create_task(gateway.seal())
    await asyncio.sleep(0.02)
    status, body, _ = await gateway.chat(key)
    assert (status, body["error"]["code"]) == (401, "session_sealed")
    assert await sealing == 2
    assert (await calls[0])[0] == 200
    status, body, _ = await calls[1]
    assert (status, body["error"]["code"]) == (503, "call_cancelled")
    records = {record.seq: record for record in gateway.log.calls()}
    assert [records[1].delivery, records[2].delivery] == [Delivery.DELIVERED, Delivery.CLIENT_ABORTED]
    assert "sealed" in records[2].error
    assert isinstance(gateway.log.events[-1], SessionSealed)
    await eventually(lambda: engine.closed_early == 1, 2.0)


async def test_a_session_that_was_never_opened_is_opened_and_sealed(gateway: RunningGateway) -> None:
    assert await gateway.seal("task/7/0/1", "infra_error") == 0
    assert await gateway.seal("task/7/0/1", "infra_error") == 0
    opened, sealed = gateway.log.events
    assert isinstance(opened, SessionOpened)
    assert isinstance(sealed, SessionSealed)
    assert (opened.group_id, sealed.calls, sealed.outcome) == ("task", 0, Outcome.INFRA_ERROR)


async def test_opening_and_sealing_are_borders_between_batches(gateway: RunningGateway) -> None:
    gateway.log.gate.clear()
    opening = [asyncio.create_task(gateway.open(f"task/{i}/0/1")) for i in range(3)]
    await eventually(lambda: gateway.parts.spool.num_records == 3)
    gateway.log.gate.set()
    keys = await asyncio.gather(*opening)
    gateway.log.gate.clear()
    calls = [asyncio.create_task(gateway.chat(key, question(text))) for key in keys for text in ("a", "b")]
    await asyncio.gather(*calls)
    seals = [asyncio.create_task(gateway.seal(f"task/{i}/0/1")) for i in range(3)]
    await asyncio.gather(*seals)
    gateway.log.gate.set()
    await eventually(lambda: gateway.parts.spool.num_records == 0)
    for batch in gateway.log.batches:
        for event in batch:
            if not isinstance(event, CallRecord):
                assert [e.session_id for e in batch].count(event.session_id) == 1


def test_a_batch_ends_at_a_border_of_its_own_session_only() -> None:
    def row(number: int, session: str, *, borders: bool) -> SpooledRecord:
        return SpooledRecord(number, session, borders, b"")

    a_open, b_open = row(1, "a", borders=True), row(2, "b", borders=True)
    a_call, b_call, a_seal = row(3, "a", borders=False), row(4, "b", borders=False), row(5, "a", borders=True)
    assert _until_border([a_open, b_open, a_call]) == [a_open, b_open]
    assert _until_border([a_call, b_call, a_call, a_seal]) == [a_call, b_call, a_call]
    assert _until_border([a_seal]) == [a_seal]


async def test_clients_that_leave_cost_nothing(gateway: RunningGateway, engine: FakeEngine) -> None:
    key = await gateway.open()
    engine.talk = lambda connection, _: count_close(engine, connection)
    for _ in range(5):
        calls = [asyncio.create_task(gateway.chat(key, question(str(number)))) for number in range(8)]
        want = len(engine.requests) + 8
        await eventually(lambda want=want: len(engine.requests) == want)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    await eventually(lambda: gateway.parts.sessions.num_in_flight == 0, 2.0)
    await eventually(lambda: engine.closed_early == 40, 2.0)
    assert gateway.parts.engines.slots["engine-0"].in_flight == 0
    assert await gateway.seal() == 40
    records = gateway.log.calls()
    assert sorted(record.seq for record in records) == list(range(1, 41))
    assert {record.delivery for record in records} == {Delivery.CLIENT_ABORTED}


async def count_close(engine: FakeEngine, connection) -> None:
    await connection.until_closed()
    engine.closed_early += 1
    connection.reset()


async def test_histories_are_bounded(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engine.url, history_max_bytes=20_000) as gateway:
        for number in range(12):
            key = await gateway.open(f"task/{number}/0/1")
            await gateway.chat(key, question("x" * 1000))
        sessions = gateway.parts.sessions
        held = sum(live.history.size_bytes + live.continuity.size_bytes for live in sessions._live.values())
        assert held == sessions.history_bytes <= 20_000
        # An evicted session goes on with whole records.
        await gateway.chat(gateway.key("task/0/0/1"), question("x" * 1000))
        record = gateway.log.calls("task/0/0/1")[-1]
        assert (record.seq, record.prompt.base_call) == (2, None)


async def test_the_heartbeat_tells_load_and_trouble(gateway: RunningGateway, engine: FakeEngine) -> None:
    await gateway.open()
    await eventually(lambda: len(gateway.log.heartbeats) >= 2)
    beat = gateway.log.heartbeats[-1]
    assert (beat.gateway_id, beat.open_sessions, beat.ready, beat.reason) == ("gateway-0", 1, True, "")
    await engine.stop()
    await eventually(lambda: not gateway.log.heartbeats[-1].ready)
    assert gateway.log.heartbeats[-1].reason.startswith("engine_down")


def test_one_process_per_spool(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with pytest.raises(SettingsError, match="POLAR_GATEWAY_ID"):
        Spool(tmp_path)
    spool.close()
    Spool(tmp_path).close()


def test_expired_sessions_are_forgotten_after_a_day(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.open_session(SessionOpened(session_id=SESSION, group_id="task", gateway_id="g"), expires_at=1000.0)
    assert spool.purge(1000.0 + 3600) == 0
    assert spool.session(SESSION) is not None
    assert spool.purge(1000.0 + 25 * 3600) == 1
    assert spool.session(SESSION) is None
    spool.close()


def test_segments_go_when_nothing_in_them_waits(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.open_session(SessionOpened(session_id=SESSION, group_id="task", gateway_id="g"), expires_at=1e12)
    for _ in range(40):
        event = SessionSealed(
            session_id=SESSION, group_id="task", calls=0, outcome=Outcome.COMPLETED, reason="x" * 10**6
        )
        spool.seal(event)
        spool.acknowledge(spool.batch(0, max_records=100, max_bytes=10**9)[-1].id)
        if spool.wants_release:
            spool.release(spool.first_needed)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert spool.size_bytes == spool.num_records == 0
    assert size < 60 * 10**6
    spool.close()


async def test_what_is_said_twice_leaves_the_sender_at_work(gateway: RunningGateway) -> None:
    for _ in range(2):
        key = await gateway.open()
        await eventually(lambda: gateway.parts.spool.num_records == 0)
        await asyncio.sleep(0.05)  # the second time there is nothing to send
    assert (await gateway.chat(key))[0] == 200
    assert len(gateway.log.calls()) == 1
