"""A demo goes on with what its data directory says."""

from pathlib import Path

import pytest

from polar.demo.options import resolve_options
from polar.errors import SettingsError
from polar.supervision.lock import DataDirLock

NONE = {
    "seed": None, "steps": None, "max_staleness": None, "kafka_home": None, "bootstrap_servers": None,
    "reward": None, "time_limit_seconds": None,
}  # fmt: skip


def resolve(folder: Path | None, **given: object):
    return resolve_options(folder, **{"fresh": False, "quick": False, **NONE, **given})


def test_a_new_demo_has_a_folder_and_topics_of_its_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("POLAR_DATA_DIR", str(tmp_path))
    options = resolve(None)
    assert options.data_dir.parent == tmp_path / "demo"
    assert options.topic_prefix != resolve(tmp_path / "other").topic_prefix
    assert (options.plan.steps, options.kind, options.plan.stop_when_solved) == (6, "shop", True)
    quick = resolve(tmp_path / "quick", quick=True)
    assert (quick.plan.steps, quick.kind, quick.plan.stop_when_solved) == (2, "letters", False)


def test_going_on_needs_the_data_directory_only(tmp_path: Path) -> None:
    first = resolve(tmp_path / "d", quick=True, seed=7, steps=3, reward=Path("reward.py"))
    assert first.reward == Path("reward.py").absolute()
    assert resolve(tmp_path / "d") == first
    assert resolve(tmp_path / "d", quick=True, steps=4).steps == 4
    assert resolve(tmp_path / "d").steps == 4


def test_a_full_demo_does_not_go_on_as_a_quick_one(tmp_path: Path) -> None:
    resolve(tmp_path / "d")
    with pytest.raises(SettingsError, match="full demo"):
        resolve(tmp_path / "d", quick=True)
    assert resolve(tmp_path / "d", quick=True, fresh=True).quick


def test_fresh_removes_an_idle_demo_and_nothing_else(tmp_path: Path) -> None:
    other = tmp_path / "precious"
    other.mkdir()
    (other / "file").touch()
    with pytest.raises(SettingsError, match="holds no demo"):
        resolve(other, fresh=True)
    first = resolve(tmp_path / "d")
    with DataDirLock(tmp_path / "d", "up"), pytest.raises(SettingsError, match="in use"):
        resolve(tmp_path / "d", fresh=True)
    assert resolve(tmp_path / "d", fresh=True).topic_prefix != first.topic_prefix
