"""Other gateways for comparison, each in an environment of its own, with one worker and no database.

They are installed from PyPI on first use and stay in the cache folder. Versions are those whose
figures were compared before; none of them records to a log.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gateway.deployment import MockEngine
from bench.gateway.measures import Target
from bench.gateway.processes import Process, free_port
from bench.gateway.workload import MODEL
from bench.record import ROOT

_INSTALL_SECONDS = 900
_MASTER_KEY = "sk-bench-0123456789abcdef-master"


@dataclass(frozen=True, slots=True)
class Peer:
    """One other gateway."""

    name: str
    package: str
    start: Callable[[Path, Path, int, int], Sequence[str]]
    """(environment's bin, folder for files, port, engine's port) → command line."""
    ready: str
    """Path that answers 200 when it serves."""
    calls: int
    """Calls a round."""
    session_prefix: str = ""
    """See Target: without a session's name it would record nothing."""


def environments() -> Path:
    """Where their environments are."""
    return Path(os.environ.get("POLAR_CACHE_DIR") or ROOT / ".polar-cache") / "bench-peers"


def install(peer: Peer) -> Path:
    """The environment's bin folder; made when it is not there. Raises RuntimeError."""
    environment = environments() / peer.package.replace("[", "-").replace("]", "")
    done = environment / "installed"
    programs = environment / "bin"
    if done.exists():
        return programs
    environments().mkdir(parents=True, exist_ok=True)
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(environment)],
        [str(programs / "pip"), "install", "--quiet", peer.package],
    ):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
        if ended.returncode != 0:
            raise RuntimeError(f"{peer.package} cannot be installed: {ended.stderr.strip()[-300:]}")
    done.touch()
    return programs


def start(peer: Peer, engine: MockEngine, folder: Path, processors: set[int]) -> tuple[Process, Target]:
    """A running peer in front of the mock engine. Raises RuntimeError."""
    programs = install(peer)
    port = free_port()
    process = Process(
        peer.start(programs, folder, port, engine.port),
        processors=processors,
        log=folder / f"{peer.name}.log",
        env={"PYTHONPATH": "", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        cwd=folder,
    )
    try:
        process.wait_for(f"http://127.0.0.1:{port}{peer.ready}", seconds=120)
    except RuntimeError:
        process.stop()
        raise
    target = Target(
        peer.name,
        port,
        (process,),
        lambda count: [_MASTER_KEY] * count,
        calls=peer.calls,
        session_prefix=peer.session_prefix,
    )
    return process, target


def _litellm(programs: Path, folder: Path, port: int, engine: int) -> Sequence[str]:
    config = folder / "litellm.yaml"
    config.write_text(
        f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n      model: openai/{MODEL}\n"
        f"      api_base: http://127.0.0.1:{engine}/v1\n      api_key: none\n"
        f"general_settings:\n  master_key: {_MASTER_KEY}\n"
    )
    return [
        str(programs / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port),
        "--num_workers", "1", "--telemetry", "False",
    ]  # fmt: skip


def _rllm(programs: Path, folder: Path, port: int, engine: int) -> Sequence[str]:
    del folder
    return [
        str(programs / "python"), "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port),
        "--worker", f"http://127.0.0.1:{engine}", "--store", "memory", "--log-level", "warning",
    ]  # fmt: skip


def _vllm_router(programs: Path, folder: Path, port: int, engine: int) -> Sequence[str]:
    del folder
    return [
        str(programs / "vllm-router"), "--host", "127.0.0.1", "--port", str(port),
        "--worker-urls", f"http://127.0.0.1:{engine}", "--policy", "round_robin",
        "--prometheus-port", str(free_port()), "--log-level", "warning",
    ]  # fmt: skip


PEERS: tuple[Peer, ...] = (
    Peer("litellm", "litellm[proxy]==1.108.7", _litellm, "/health/liveliness", calls=40),
    Peer("rllm", "rllm-model-gateway==0.1.0", _rllm, "/health", calls=150, session_prefix="/sessions/{}"),
    Peer("vllm_router", "vllm-router==0.1.17", _vllm_router, "/health", calls=3000),
)
