"""A model folder is complete or absent."""

import threading
from pathlib import Path

import pytest

from polar.engines.model_cache import built_once, default_cache_dir


def test_a_failed_build_leaves_no_model(tmp_path: Path) -> None:
    def torn(folder: Path) -> None:
        (folder / "half").write_text("…")
        raise OSError("disk full")

    def whole(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "config.json").write_text("{}")

    with pytest.raises(OSError, match="disk full"):
        built_once(tmp_path, "m", torn)
    assert not (tmp_path / "m").exists()
    made = built_once(tmp_path, "m", whole)
    assert [file.name for file in made.iterdir()] == ["config.json"]


def test_those_who_ask_together_share_one_build(tmp_path: Path) -> None:
    builds: list[Path] = []
    together = threading.Barrier(4)

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "config.json").write_text("{}")

    def ask() -> None:
        together.wait(5)
        assert (built_once(tmp_path, "m", build) / "config.json").is_file()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert len(builds) == 1


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_CACHE_DIR", "/somewhere")
    assert default_cache_dir() == Path("/somewhere")
    monkeypatch.delenv("POLAR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/polar")
