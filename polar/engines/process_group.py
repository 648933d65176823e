"""An engine's processes end together.

vLLM's engine core goes on for ever when its API server is killed with -9, and keeps its memory.
Invariant: once the leader of the group is gone, so is every member that watches it.
"""

import os
import select
import signal
import threading

LEADER = "POLAR_ENGINE_LEADER"
"""Environment variable with the pid of the API server, inherited by its children."""


def announce_leader() -> None:
    """Called by the API server: its children are to end with it."""
    if os.getpgid(0) == os.getpid():
        os.environ[LEADER] = str(os.getpid())


def end_with_leader() -> None:
    """Called by a child: kill the whole group as soon as its announced leader is gone.

    Does nothing in a server that somebody started without polar.
    """
    leader = os.getpgid(0)
    if os.environ.get(LEADER) != str(leader) or leader == os.getpid():
        return
    try:
        handle = os.pidfd_open(leader)
    except ProcessLookupError:
        os.killpg(leader, signal.SIGKILL)
        return
    threading.Thread(target=_watch, args=(handle, leader), name="engine-leader", daemon=True).start()


def _watch(handle: int, leader: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)  # readable once the process has ended
    poll.poll()
    os.killpg(leader, signal.SIGKILL)
