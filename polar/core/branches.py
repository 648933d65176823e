"""How the calls of a session follow one another in its tree.

For each call: the earlier call that its prompt extends, and where it splits from the one it has
most in common with. Time in proportion to calls and runs (times a logarithm), whatever the
number of branches.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from polar.core.prefix_tree import TreePaths

Place = tuple[int, int]
"""(run, offset) in an exported tree; (-1, 0) for the empty path."""


@dataclass(frozen=True, slots=True)
class PlacedPath:
    """A call in the tree: where its prompt and its last token end."""

    seq: int
    prompt: Place
    end: Place


@dataclass(frozen=True, slots=True)
class Relation:
    """What a call has in common with the calls before it."""

    extends: int | None = None
    """seq of the latest of the longest paths that are a prefix of its prompt."""
    against: int | None = None
    """seq of the latest path with the longest common prefix, where that is longer than what it
    extends: a split. None where there is none."""
    index: int = 0
    """Length of that common prefix."""


class PlaceOrder:
    """Places in depth-first order: those below a place are neighbours."""

    def __init__(self, places: Sequence[Place], paths: TreePaths) -> None:
        self._sorted = sorted(places)
        self._paths = paths

    def below(self, place: Place) -> tuple[int, int]:
        """Range of the places of which the path to `place` is a prefix."""
        if place[0] < 0:
            return 0, len(self._sorted)
        after = (self._paths.last[place[0]] + 1, 0)
        return bisect_left(self._sorted, place), bisect_left(self._sorted, after)


def relate(calls: Sequence[PlacedPath], paths: TreePaths) -> list[Relation]:
    """The relation of each call to those before it; `calls` in order of seq, none of them empty."""
    extended = _extended(calls, paths)
    covered = _Covered(paths)
    order = PlaceOrder([call.end for call in calls], paths)
    latest = _LatestIn(calls, order)
    relations = []
    for number, call in enumerate(calls):
        base = extended[number]
        extends = calls[base].seq if base >= 0 else None
        place = covered.deepest(call.prompt)
        index = paths.depth(*place)
        if number == 0 or (base >= 0 and paths.depth(*calls[base].end) == index):
            relations.append(Relation(extends))
        else:
            relations.append(Relation(extends, calls[latest.below(place)].seq, index))
        covered.add(call.end)
        latest.add(number)
    return relations


def _extended(calls: Sequence[PlacedPath], paths: TreePaths) -> list[int]:
    """[calls] index of the earlier call whose path is the longest prefix of the prompt; -1: none."""
    above = [-1] * len(calls)
    """End → the next end above it (of equal ones, the call before)."""
    nearest = [-1] * len(calls)
    """Prompt → the next end above it, earlier or later."""
    entries = [(call.end, 0, number) for number, call in enumerate(calls)]
    entries += [(call.prompt, 1, number) for number, call in enumerate(calls)]
    open_ends: list[int] = []
    for place, is_prompt, number in sorted(entries):
        while open_ends and not paths.is_prefix(calls[open_ends[-1]].end, place):
            open_ends.pop()
        (nearest if is_prompt else above)[number] = open_ends[-1] if open_ends else -1
        if not is_prompt:
            open_ends.append(number)
    # Backwards, each call is taken out before it asks: what is left above its prompt is earlier.
    found = [-1] * len(calls)
    left = list(range(len(calls)))
    for number in range(len(calls) - 1, -1, -1):
        left[number] = above[number]
        found[number] = _first_left(left, nearest[number])
    return found


def _first_left(left: list[int], end: int) -> int:
    """Follow ends that were taken out to the first that was not, and shorten the way."""
    way = []
    while end >= 0 and left[end] != end:
        way.append(end)
        end = left[end]
    for passed in way:
        left[passed] = end
    return end


class _Covered:
    """Which tokens of the tree lie on the path of a call that was added."""

    def __init__(self, paths: TreePaths) -> None:
        self._paths = paths
        self._extent = [0] * len(paths.parents)
        """[runs] leading tokens that are covered."""

    def add(self, end: Place) -> None:
        run, extent = end
        while run >= 0 and self._extent[run] < extent:
            self._extent[run] = extent
            run, extent = self._above(run)

    def deepest(self, prompt: Place) -> Place:
        """Where the covered part of a path ends."""
        run, extent = prompt
        while run >= 0 and not self._extent[run]:
            run, extent = self._above(run)
        return run, min(extent, self._extent[run]) if run >= 0 else 0

    def _above(self, run: int) -> Place:
        parent = self._paths.parents[run]
        return parent, self._paths.length(parent) if parent >= 0 else 0


class _LatestIn:
    """The latest added call below a place: a tree of maxima over the ends in depth-first order."""

    def __init__(self, calls: Sequence[PlacedPath], order: PlaceOrder) -> None:
        self._order = order
        self._size = len(calls)
        self._rank = [0] * len(calls)
        for rank, number in enumerate(sorted(range(len(calls)), key=lambda number: calls[number].end)):
            self._rank[number] = rank
        self._maxima = [-1] * (2 * len(calls))

    def add(self, number: int) -> None:
        at = self._rank[number] + self._size
        while at >= 1:
            self._maxima[at] = number  # numbers only grow
            at //= 2

    def below(self, place: Place) -> int:
        low, high = self._order.below(place)
        low, high, best = low + self._size, high + self._size, -1
        while low < high:
            if low % 2:
                best = max(best, self._maxima[low])
                low += 1
            if high % 2:
                high -= 1
                best = max(best, self._maxima[high])
            low, high = low // 2, high // 2
        return best
