"""The collector's arrangement: survivors leave its sight, and a sweep still finds their cycles."""

import gc
import subprocess
import sys

SCRIPT = """
import gc, weakref
from polar.gateway import garbage

class Node: pass

def cycle():
    node = Node(); node.me = node
    return node

garbage.calm()
before = gc.get_freeze_count()
old = cycle()
kept = [[] for _ in range(60_000)]
assert gc.get_freeze_count() - before > 25_000, gc.get_freeze_count() - before
gone = weakref.ref(old)
del old
gc.collect()
assert gone() is not None, "it was taken out of sight"
assert garbage.sweep() > 0 and gone() is None
young = weakref.ref(cycle())
kept += [[] for _ in range(60_000)]
assert young() is None, "young cycles are found without a sweep"
"""


def test_survivors_leave_sight_and_a_sweep_finds_their_cycles() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert gc.get_threshold()[0] != 0
