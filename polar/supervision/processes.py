"""Start a child that dies with its parent; find and kill everything a deployment started.

Invariant: no process of a deployment outlives it, not even when `polar up` is killed with -9.
Three nets, because each has holes:
- the kernel kills a direct child when its parent dies (PR_SET_PDEATHSIG; not inherited by
  grandchildren);
- every descendant inherits an environment variable that names the deployment, by which a
  sweep over /proc finds orphans (vLLM's engine core, a harness, a broker's storage server);
- a warden process (polar.supervision.warden) sweeps at the moment the parent is gone.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

MARKER = "POLAR_DEPLOYMENT"
"""Environment variable that every process of a deployment carries: its data directory."""
SERVICE_MARKER = "POLAR_SERVICE"
"""Environment variable that names the service a process belongs to."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(sig: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn`: the child gets `sig` when the thread that started it ends.

    Start children from the main thread only. A parent that died before the call took effect
    is noticed too, since the child then has another parent.
    """
    parent = os.getpid()

    def set_death_signal() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return set_death_signal


def start_child(
    argv: Sequence[str], *, env: Mapping[str, str], log: IO[bytes], cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in its own process group; stdout and stderr go to `log`, stdin is empty."""
    return subprocess.Popen(
        list(argv),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        start_new_session=True,
        preexec_fn=die_with_parent(),  # noqa: PLW1509  (one prctl call, no locks taken)
    )


def find_marked(deployment: str, service: str | None = None) -> list[int]:
    """Pids of living processes that carry the deployment's marker (and the service's), not this one."""
    wanted = [f"{MARKER}={deployment}".encode()]
    if service is not None:
        wanted.append(f"{SERVICE_MARKER}={service}".encode())
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # Processes come and go, and those of other users are not readable.
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            if all(item in variables for item in wanted):
                found.append(int(entry.name))
    return found


def sweep(
    deployment: str, service: str | None = None, *, spare: frozenset[int] = frozenset(), seconds: float = 5.0
) -> int:
    """Kill (-9) what carries the markers until nothing is left; number of processes killed.

    Gives up after `seconds`: a process in uninterruptible sleep cannot be killed by anybody.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + seconds
    while True:
        pids = [pid for pid in find_marked(deployment, service) if pid not in spare]
        if not pids or time.monotonic() > deadline:
            return len(killed)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.02)
