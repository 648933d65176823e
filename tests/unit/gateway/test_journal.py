"""Segments of a journal that go: what is kept is on the disk first, and their files come back as new ones."""

import os
from pathlib import Path
from typing import Any

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
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        events.append(f"{path.name} goes")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    old_name, kept_name = sorted(path.name for path in tmp_path.iterdir())
    journal.release(kept)
    assert (old, kept) == (kept - 1, kept)
    assert events == [kept_name, tmp_path.name, f"{old_name} goes"]
    journal.close()
    again = Journal(tmp_path)
    assert [head["kind"] for head, _ in again.frames()] == ["state", "change"]
    again.close()


def heads(folder: Path) -> list[dict[str, Any]]:
    """What a later process reads."""
    journal = Journal(folder)
    found = [dict(head) for head, _ in journal.frames()]
    journal.close()
    return found


def test_a_file_is_written_over_and_nothing_of_before_is_read_from_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin_segment({"kind": "state", "number": 1})
    for number in range(4):
        journal.append({"kind": "change", "number": number}, [b"x" * 1000])
    inode = next(tmp_path.iterdir()).stat().st_ino
    journal.begin_segment({"kind": "state", "number": 2})
    journal.release(journal.segment)
    # As large as the frames of before, so that their borders meet.
    journal.begin_segment({"kind": "state", "number": 3})
    path = max(tmp_path.glob("segment-0*"))
    assert path.stat().st_ino == inode, "no page of the kernel's is given back"
    (place,) = journal.append({"kind": "change", "number": 9}, [b"y" * 1000])
    assert journal.read(place) == b"y" * 1000
    assert path.stat().st_size > 4000, "what stood there is there still"
    journal.release(journal.segment)
    journal.close()
    wanted = [{"kind": "state", "number": 3}, {"kind": "change", "number": 9, "sizes": [1000]}]
    assert heads(tmp_path) == wanted


@pytest.mark.parametrize("releases", [1, 5])
def test_one_spare_file_is_kept_and_goes_with_a_restart(tmp_path: Path, releases: int) -> None:
    journal = Journal(tmp_path)
    for number in range(releases + 1):
        journal.begin_segment({"kind": "state", "number": number})
    journal.release(journal.segment)
    assert len(list(tmp_path.iterdir())) == 2
    journal.close()
    Journal(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == [f"segment-{releases + 1:010d}"]


def test_an_opened_journal_goes_on_in_a_new_segment(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin_segment({"kind": "state"})
    journal.close()
    journal = Journal(tmp_path)
    with pytest.raises(RuntimeError, match="new segment"):
        journal.append({"kind": "change"})
    journal.begin_segment({"kind": "state"})
    journal.append({"kind": "change"})
    journal.close()
    assert [head["kind"] for head in heads(tmp_path)] == ["state", "state", "change"]


def test_what_stood_in_a_file_before_makes_no_room_for_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.begin_segment({"kind": "state"})
    journal.append({"kind": "change"}, [b"1,2345,678," * 1000])
    journal.begin_segment({"kind": "state"})
    journal.release(journal.segment)
    # Its end lies in the middle of the text of before, whose digits read as a size of a gigabyte.
    journal.begin_segment({"kind": "state", "filling": "x" * 500})
    path = max(tmp_path.glob("segment-0*"))
    journal.release(journal.segment)
    journal.close()
    asked: list[int] = []
    pread = os.pread

    def note_size(descriptor: int, size: int, offset: int) -> bytes:
        asked.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", note_size)
    assert [head["kind"] for head in heads(tmp_path)] == ["state"]
    assert max(asked) <= path.stat().st_size
