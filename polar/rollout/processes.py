"""Run a command as a process group of its own and end it as a whole.

Invariant: when `run_command` returns or is cancelled, no process that the command started is
alive: not its group, not a grandchild that made a session of its own (found by the runtime
directory in its environment). Output is read to its end and kept up to a limit.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from polar.supervision.processes import die_with_parent

RUNTIME_MARKER = "POLAR_RUNTIME_DIR"
"""Environment variable that every process of a runtime carries: its directory."""

_TERM_SECONDS = 2.0
"""From SIGTERM to SIGKILL."""
_SWEEPS = 40
_SWEEP_PAUSE_SECONDS = 0.05
_HEAD_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended."""

    status: int | None
    """Exit status; negative: the signal that ended it; None: it ran out of time."""
    seconds: float
    stdout_tail: str
    """At most the last 64 KiB."""
    stderr_tail: str

    @property
    def words(self) -> str:
        """For a person: how it ended, with the last line of stderr."""
        if self.status is None:
            how = "out of time"
        elif self.status < 0:
            how = f"killed by {signal.Signals(-self.status).name}"
        else:
            how = f"exit status {self.status}"
        lines = self.stderr_tail.strip().splitlines()
        return f"{how}: {lines[-1][-300:]}" if lines and self.status != 0 else how


class _CappedOutput(asyncio.Protocol):
    """The read end of a pipe: the first MiB goes to a file, the last 64 KiB are remembered."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._written = 0
        self._left_out = 0
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        kept = data[: max(_HEAD_BYTES - self._written, 0)]
        self._file.write(kept)
        self._written += len(kept)
        self._left_out += len(data) - len(kept)
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (asyncio's name)
        if self._left_out:
            tail = self.tail[-min(self._left_out, _TAIL_BYTES) :]
            self._file.write(b"\n[%d bytes left out]\n" % max(self._left_out - len(tail), 0) + tail)
        self._file.close()
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def tail(self) -> bytes:
        return b"".join(self._tail)[-_TAIL_BYTES:]


class _Pipe:
    """A pipe whose read end feeds a capped file."""

    def __init__(self, output: _CappedOutput, transport: asyncio.ReadTransport, write_end: int) -> None:
        self._output = output
        self._transport = transport
        self.write_end = write_end

    @classmethod
    async def open(cls, path: Path) -> "_Pipe":
        read_end, write_end = os.pipe()
        loop = asyncio.get_running_loop()
        transport, output = await loop.connect_read_pipe(
            lambda: _CappedOutput(path), os.fdopen(read_end, "rb", buffering=0)
        )
        return cls(output, transport, write_end)

    def close_write_end(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    async def finish(self) -> str:
        """The last bytes as text. All writers are dead, so the end comes at once."""
        self.close_write_end()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._output.ended), _TERM_SECONDS)
        self._transport.close()
        await self._output.ended
        return self._output.tail.decode(errors="replace")


async def run_command(
    command: str,
    *,
    directory: Path,
    env: Mapping[str, str],
    timeout_seconds: float,
    name: str,
    on_start: Callable[[int], None],
    on_end: Callable[[int], None],
) -> CommandResult:
    """Run `sh -c command` in `directory`; stdout and stderr go to NAME.stdout.log, NAME.stderr.log.

    `on_start(pid)` is called before anything can be waited for, `on_end(pid)` when the whole
    group is gone. Raises OSError when it cannot be started.
    """
    out = await _Pipe.open(directory / f"{name}.stdout.log")
    err = await _Pipe.open(directory / f"{name}.stderr.log")
    began = time.monotonic()
    status: int | None = None
    try:
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", command,
            stdin=asyncio.subprocess.DEVNULL, stdout=out.write_end, stderr=err.write_end,
            cwd=directory, env={**env, RUNTIME_MARKER: str(directory)},
            start_new_session=True, preexec_fn=die_with_parent(),
        )  # fmt: skip
        out.close_write_end()
        err.close_write_end()
        try:
            on_start(process.pid)
            with contextlib.suppress(TimeoutError):
                status = await asyncio.wait_for(process.wait(), timeout_seconds)
        finally:
            await end_group(process.pid, directory)
            await process.wait()
            on_end(process.pid)
    finally:
        stdout_tail, stderr_tail = await out.finish(), await err.finish()
    return CommandResult(status, time.monotonic() - began, stdout_tail, stderr_tail)


async def end_group(leader: int, directory: Path) -> None:
    """Ask the group to end, then kill it and everything that carries the runtime's directory."""
    if _signal_group(leader, signal.SIGTERM):
        deadline = time.monotonic() + _TERM_SECONDS
        # The kernel tells nobody when a group is empty.
        while time.monotonic() < deadline and _group_exists(leader):  # noqa: ASYNC110
            await asyncio.sleep(_SWEEP_PAUSE_SECONDS)
        _signal_group(leader, signal.SIGKILL)
    await sweep_runtime(directory)


async def sweep_runtime(directory: Path) -> None:
    """Kill every process that carries the runtime's directory, until there is none."""
    for _ in range(_SWEEPS):
        pids = await asyncio.to_thread(find_processes, directory)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(_SWEEP_PAUSE_SECONDS)


def find_processes(directory: Path) -> list[int]:
    """Pids of living processes of the runtime in `directory`, or of all runtimes below it."""
    exact = f"{RUNTIME_MARKER}={directory}".encode()
    below = exact + b"/"
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        # Processes come and go, those of other users are not readable, zombies have no environment.
        with contextlib.suppress(OSError):
            for variable in (entry / "environ").read_bytes().split(b"\0"):
                if variable == exact or variable.startswith(below):
                    found.append(int(entry.name))
                    break
    return found


def start_time(pid: int) -> int | None:
    """Start of a living process in clock ticks since boot; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _signal_group(leader: int, sig: int) -> bool:
    try:
        os.killpg(leader, sig)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _group_exists(leader: int) -> bool:
    """Whether a process of the group is alive; a zombie that nobody has waited for counts as well."""
    return _signal_group(leader, 0)
