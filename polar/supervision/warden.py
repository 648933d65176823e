"""Sweeps up a deployment when its parent dies, however it dies.

    python -m polar.supervision.warden DATA_DIR    (stdin: a pipe held open by the parent)

The parent holds the other end of stdin; end of file means that it is gone. The warden stands in
its own session and carries no marker, so that neither Ctrl-C nor a sweep ends it first. It keeps
the parent's lock file open: nobody else can use the data directory before the sweep is over.
"""

import os
import signal
import subprocess
import sys

from polar.supervision.lock import DataDirLock
from polar.supervision.processes import MARKER, SERVICE_MARKER, sweep


def start_warden(deployment: str, *, lock: DataDirLock) -> subprocess.Popen[bytes]:
    """Start one for the calling process; closing its `stdin` (or dying) sets off the sweep."""
    env = {name: value for name, value in os.environ.items() if name not in {MARKER, SERVICE_MARKER}}
    return subprocess.Popen(
        [sys.executable, "-m", "polar.supervision.warden", deployment],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(lock.fileno(),),
    )


def main() -> None:
    """Wait for end of file on stdin, then sweep."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    deployment = sys.argv[1]
    while os.read(0, 4096):
        pass
    sweep(deployment)


if __name__ == "__main__":
    main()
