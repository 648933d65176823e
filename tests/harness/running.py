"""Harness processes: a scrubbed environment, a home of their own, an end as a whole group."""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_REFUSED = "http://127.0.0.1:9"
"""A proxy that nobody is: what a harness wants from the outside world fails at once."""
_LINGER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a harness."""

    status: int | None
    """Exit status; None when it had to be killed at the time limit."""
    lingered: bool
    """It was killed because it had nothing left to do and did not exit."""
    output: str
    """Both streams."""
    seconds: float


def scrubbed(home: Path) -> dict[str, str]:
    """The least that a program needs, nothing of the tests' own environment."""
    node = shutil.which("node")
    folders = [*([str(Path(node).parent)] if node else []), "/usr/local/bin", "/usr/bin", "/bin"]
    return {
        "HOME": str(home),
        "PATH": ":".join(dict.fromkeys(folders)),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "TMPDIR": str(home),
        "HTTP_PROXY": _REFUSED,
        "HTTPS_PROXY": _REFUSED,
        "NO_PROXY": "127.0.0.1,localhost",
    }


async def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    time_limit_seconds: float,
    is_done: Callable[[], bool],
) -> Finished:
    """Run a program to its end; at the limit, and in any case at the end, its whole group is killed.

    `is_done`: whether it has nothing left to do; then it has a while to exit.
    """
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command,
        env=dict(environment),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    output = bytearray()

    async def read() -> None:
        while data := await process.stdout.read(65536):  # type: ignore[union-attr]
            output.extend(data)

    reading = asyncio.create_task(read())
    waiting = asyncio.create_task(process.wait())
    idle_since: float | None = None
    lingered = False
    try:
        while not waiting.done() and time.monotonic() < started + time_limit_seconds and not lingered:
            await asyncio.wait({waiting}, timeout=1.0)
            idle_since = (idle_since or time.monotonic()) if is_done() else None
            lingered = idle_since is not None and time.monotonic() - idle_since > _LINGER_SECONDS
        status = waiting.result() if waiting.done() else None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await waiting
        await asyncio.wait({reading}, timeout=2.0)  # children that left the group may hold the pipe
        reading.cancel()
    return Finished(
        status, lingered and status is None, output.decode("utf-8", "replace"), time.monotonic() - started
    )
