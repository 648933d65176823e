"""The spool against a model of it: any changes, any restart, frames cut anywhere, disks that refuse."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polar.gateway.spool as spool_module
from polar.core.recording import RecordedCall, recorded, unfinished_record
from polar.gateway.spool import Spool
from schemas.calls import SessionOpened, SessionSealed
from schemas.policies import BASE_VERSION
from schemas.sessions import Outcome

SESSIONS = ("t/0/0/1", "t/1/0/1")


def encoded(session: str, seq: int, text: str = "") -> RecordedCall:
    record = unfinished_record(
        session, "t", seq, request_digest="d", choice_index=0, stream=False, sampling_used={},
        engine_id="e", version=BASE_VERSION, error=text,
    )  # fmt: skip
    return recorded(record)


def opened(spool: Spool, session: str) -> int:
    return spool.open_session(SessionOpened(session_id=session, group_id="t", gateway_id="g"), 1e12)


def sealed(spool: Spool, session: str) -> int:
    return spool.seal(
        SessionSealed(session_id=session, group_id="t", calls=0, outcome=Outcome.COMPLETED, reason="")
    )


def everything(spool: Spool) -> dict[str, Any]:
    """All that a spool tells."""
    return {
        "rows": [spool.session(session) for session in SESSIONS],
        "open": (spool.open_sessions(10), spool.num_open),
        "unrecorded": spool.unrecorded(),
        "waiting": spool.batch(0, max_records=1000, max_bytes=10**9),
        "counts": (spool.num_records, spool.size_bytes),
    }


steps = st.lists(
    st.tuples(
        st.sampled_from(["open", "reserve", "record", "seal", "acknowledge", "restart", "kill"]),
        st.integers(0, 1),
        st.integers(1, 3),
    ),
    max_size=25,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(steps)
def test_a_restart_finds_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: list[tuple[str, int, int]]
) -> None:
    monkeypatch.setattr(spool_module, "SEGMENT_BYTES", 2000)
    monkeypatch.setattr(spool_module, "_HELD_BYTES", 1500)
    monkeypatch.setattr(spool_module, "_MAX_CHANGED", 1)
    folder = tmp_path / "spool"
    shutil.rmtree(folder, ignore_errors=True)
    spool = Spool(folder)
    written: list[int] = []
    acknowledged = 0
    for step, which, count in script:
        session = SESSIONS[which]
        row = spool.session(session)
        if step == "open" and row is None:
            written.append(opened(spool, session))
        elif step == "reserve" and row is not None and row.sealed_record is None:
            assert spool.reserve(session, [b'{"n":1}'] * count) == row.next_seq - count
        elif step == "record" and (numbers := spool.unrecorded(session)):
            calls = [encoded(session, seq, "x" * 200) for _, seq, _ in numbers[:count]]
            written.append(spool.record(session, calls))
            assert spool.batch(written[-1] - 1, max_records=1, max_bytes=0)[0].data == calls[-1].data
        elif step == "seal" and row is not None and row.sealed_record is None:
            written.append(sealed(spool, session))
        elif step == "acknowledge" and (batch := spool.batch(0, max_records=count, max_bytes=10**9)):
            acknowledged = batch[-1].id
            spool.acknowledge(acknowledged)
            assert not spool.has_record(acknowledged)
            if spool.wants_release:
                spool.release(spool.first_needed)
        elif step == "restart":
            before = everything(spool)
            spool.close()
            spool = Spool(folder)
            assert everything(spool) == before
        elif step == "kill":
            before = everything(spool)
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, copy)
            again = Spool(copy)
            after = everything(again)
            again.close()
            # What was acknowledged last may be waiting again; nothing else differs.
            sent = len(after["waiting"]) - len(before["waiting"])
            assert after["waiting"][sent:] == before["waiting"]
            assert all(record.id <= acknowledged for record in after["waiting"][:sent])
            assert {**after, "waiting": 0, "counts": 0} == {**before, "waiting": 0, "counts": 0}
    spool.close()


def test_a_frame_that_is_cut_off_anywhere_ends_the_journal(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "a")
    opened(spool, SESSIONS[0])
    spool.reserve(SESSIONS[0], [b"{}"])
    (path,) = (tmp_path / "a").glob("segment-*")
    whole = path.stat().st_size
    spool.record(SESSIONS[0], [encoded(SESSIONS[0], 1)])
    data = path.read_bytes()
    spool.close()
    for size in (whole, whole + 3, whole + 40, len(data) - 1):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / path.name).write_bytes(data[:size])
        again = Spool(folder)
        assert [seq for _, seq, _ in again.unrecorded()] == [1]
        assert again.num_records == 1
        again.close()
    (tmp_path / "damaged").mkdir()
    bent = bytearray(data)
    bent[-5] ^= 1
    (tmp_path / "damaged" / path.name).write_bytes(bytes(bent))
    again = Spool(tmp_path / "damaged")
    assert len(again.unrecorded()) == 1
    again.close()


def test_a_disk_that_takes_half_a_frame_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)
    opened(spool, SESSIONS[0])
    spool.reserve(SESSIONS[0], [b"{}"])
    before = everything(spool)
    real = os.pwritev

    def half(descriptor: int, parts: list[bytes], offset: int) -> int:
        data = b"".join(parts)
        return os.pwrite(descriptor, data[: len(data) // 2], offset)

    def full(descriptor: int, parts: list[bytes], offset: int) -> int:
        raise OSError(28, "No space left on device")

    for pwritev in (half, full):
        monkeypatch.setattr(os, "pwritev", pwritev)
        with pytest.raises(OSError):
            spool.record(SESSIONS[0], [encoded(SESSIONS[0], 1)])
        assert everything(spool) == before
    monkeypatch.setattr(os, "pwritev", real)
    spool.record(SESSIONS[0], [encoded(SESSIONS[0], 1)])
    after = everything(spool)
    spool.close()
    spool = Spool(tmp_path)
    assert everything(spool) == after
    assert spool.unrecorded() == []
    spool.close()
