"""Releasing segments of a journal: what is kept is on the disk first, what goes need not be."""

import os
from pathlib import Path

import pytest

from polar.gateway.journal import Journal


def test_a_released_segment_is_not_synced_and_goes_after_what_is_kept_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.begin_segment({"kind": "state", "number": 1})
    old = journal.segment
    journal.append({"kind": "change"}, [b"x" * 1000])
    journal.begin_segment({"kind": "state", "number": 2})
    kept = journal.segment
    journal.append({"kind": "change"}, [b"y"])
    events: list[str] = []
    fsync, unlink = os.fsync, Path.unlink

    def note_sync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def note_unlink(path: Path, *, missing_ok: bool = False) -> None:
        events.append(f"unlink {path.name}")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "unlink", note_unlink)
    old_name, kept_name = sorted(path.name for path in tmp_path.iterdir())
    journal.release(kept)
    assert (old, kept) == (kept - 1, kept)
    assert events == [kept_name, tmp_path.name, f"unlink {old_name}"]
    journal.close()
    again = Journal(tmp_path)
    assert [head["kind"] for head, _ in again.frames()] == ["state", "change"]
    again.close()
