"""Processes under measurement: started on given processors, their CPU time and memory read from /proc."""

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar.supervision.ports import is_free

_PROC = Path("/proc")
_started: "list[Process]" = []
_ports = iter(range(12_000 + os.getpid() % 5000 * 2, 32_000, 2))


class Process:
    """A program with everything that it starts."""

    def __init__(
        self, argv: Sequence[str], *, processors: set[int], log: Path, env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:  # fmt: skip
        self._log = log
        with log.open("ab") as output:
            # A session of its own, so that all of it can be ended.
            self._process = subprocess.Popen(
                list(argv), stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, **(env or {})}, cwd=cwd,
            )  # fmt: skip
        os.sched_setaffinity(self._process.pid, processors)
        _started.append(self)

    @property
    def pids(self) -> list[int]:
        """The process and all its descendants."""
        children: dict[int, list[int]] = {}
        for entry in _PROC.iterdir():
            if entry.name.isdigit() and (parent := _parent(entry)) is not None:
                children.setdefault(parent, []).append(int(entry.name))
        found, todo = [], [self._process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            todo += children.get(pid, [])
        return found

    def cpu_seconds(self) -> float:
        """CPU time so far of all threads of all its processes, to the nanosecond where the kernel tells."""
        return sum(_cpu_seconds(pid) for pid in self.pids)

    def memory_mb(self) -> float:
        """Proportional set size of all its processes."""
        return sum(_memory_mb(pid) for pid in self.pids)

    def wait_for(self, url: str, *, seconds: float = 60.0) -> None:
        """Returns when the URL answers 200. Raises RuntimeError with the log's end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"{url} does not answer; the log ends with: {self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        return self._log.read_text(errors="replace")[-1500:]

    def stop(self) -> None:
        """End it and what it started."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(45)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def stop_all() -> None:
    """End everything that was started and still runs, whatever interrupted its user."""
    while _started:
        _started.pop().stop()


def free_port() -> int:
    """A port on loopback that, like the one after it, nobody listens on; never the same twice.

    Below those that the kernel gives to outgoing connections: what was free there may be taken meanwhile.
    """
    for port in _ports:
        if is_free(port) and is_free(port + 1):
            return port
    raise RuntimeError("no port is free")


def _parent(entry: Path) -> int | None:
    try:
        stat = (entry / "stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _cpu_seconds(pid: int) -> float:
    """Run time of all threads; threads that ended are in none of these files, so none may end meanwhile."""
    nanoseconds = 0
    try:
        for thread in (_PROC / str(pid) / "task").iterdir():
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    except (OSError, IndexError):
        return _cpu_ticks(pid)
    return nanoseconds / 1e9


def _cpu_ticks(pid: int) -> float:
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mb(pid: int) -> float:
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)
