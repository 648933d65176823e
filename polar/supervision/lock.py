"""One deployment a data directory: an advisory lock that the kernel frees when its holders die."""

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from polar.errors import SettingsError


class DataDirLock:
    """Context manager around DATA_DIR/<name>.lock; the file holds the pid of its owner.

    Raises SettingsError on entering when a living process holds it. When its owner is dead but a
    warden still sweeps, entering waits for that, `patience_seconds` at most.
    """

    def __init__(self, data_dir: Path, name: str, *, patience_seconds: float = 15.0) -> None:
        self._path = data_dir / f"{name}.lock"
        self._patience_seconds = patience_seconds
        self._file: int | None = None

    def fileno(self) -> int:
        """The locked file, to hand on to a warden."""
        if self._file is None:
            raise ValueError("the lock is not held")
        return self._file

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Python opens files close-on-exec: no child keeps the lock alive by accident.
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + self._patience_seconds
        while not _try_lock(file):
            owner = _read_pid(file)
            if (owner is not None and _is_alive(owner)) or time.monotonic() > deadline:
                os.close(file)
                raise SettingsError(
                    f"{self._path.parent} is in use by process {owner or '?'}; stop that one or take "
                    "another --data-dir"
                )
            time.sleep(0.05)
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def lock_owner(data_dir: Path, name: str) -> int | None:
    """Pid of the living process that holds the lock now; none when nobody does."""
    path = data_dir / f"{name}.lock"
    if not path.exists():
        return None
    file = os.open(path, os.O_RDWR)
    try:
        if _try_lock(file):
            return None
        owner = _read_pid(file)
        return owner if owner is not None and _is_alive(owner) else None
    finally:
        os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_pid(file: int) -> int | None:
    text = os.pread(file, 32, 0).decode().strip()
    return int(text) if text.isdigit() else None


def _is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie that its parent has not collected yet is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}
