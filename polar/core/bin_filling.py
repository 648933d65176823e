"""Bin packing: few bins, most of them full, so that what room is left lies in few of them.

Deterministic: equal weights keep their order.
"""

import bisect
from collections.abc import Sequence

EXACT_WEIGHTS = 256
"""Of more weights, the larger and the smaller half of so many are looked at exactly."""
_VARIED = 32
"""Up to so many weights, every one of them is tried as the first of the first bin."""
_SEEDS = (None, 0.0, 0.5, 1.0)
"""What each bin but the first begins with; see `_fullest_bins`."""

Bins = list[list[int]]
"""Indexes of weights by bin."""


def fill_bins(weights: Sequence[int], room: int, *, is_quick: bool = False) -> Bins:
    """Indexes of `weights` by bin; the sum of a bin is at most `room`.

    A weight above `room` gets a bin of its own. No two bins could be one. Of best fit decreasing and
    several ways to fill bin after bin as full as it goes, the one with the fewest bins is taken, of
    those the one that leaves its room in the fewest bins. `is_quick`: best fit decreasing alone.
    """
    if not weights:
        return []
    if sum(weights) <= room:
        return [list(range(len(weights)))]
    order = sorted(range(len(weights)), key=lambda index: -weights[index])
    found = [_best_fit_decreasing(weights, order, room)]
    firsts = range(len(order)) if len(order) <= _VARIED else (0,)
    for first in () if is_quick else firsts:
        found += [_fullest_bins(weights, order, room, seed, first) for seed in _SEEDS]

    def cost(bins: Bins) -> tuple[int, int]:
        return len(bins), -sum((room - sum(weights[index] for index in each)) ** 2 for each in bins)

    return min(found, key=cost)


def fullest(weights: Sequence[int], room: int) -> list[int]:
    """Indexes, ascending, of a subset whose sum is the largest that is at most `room`.

    Exact for up to EXACT_WEIGHTS weights, for more of them near it. Subset sums are the bits of
    one integer: a shift and an OR a weight.
    """
    fitting = [index for index, weight in enumerate(weights) if weight <= room]
    if not fitting or sum(weights[index] for index in fitting) <= room:
        return fitting
    if len(fitting) <= EXACT_WEIGHTS:
        return _exact(weights, fitting, room)
    fitting.sort(key=lambda index: -weights[index])
    half = EXACT_WEIGHTS // 2
    taken = _exact(weights, [*fitting[:half], *fitting[-half:]], room)
    free = room - sum(weights[index] for index in taken)
    for index in fitting[half:-half]:
        if weights[index] <= free:
            taken.append(index)
            free -= weights[index]
    return sorted(taken)


def _exact(weights: Sequence[int], indexes: Sequence[int], room: int) -> list[int]:
    mask = (1 << (room + 1)) - 1
    reach, before = 1, []
    for index in indexes:
        before.append(reach)
        reach |= (reach << weights[index]) & mask
    rest = reach.bit_length() - 1
    taken = []
    for index, sums in zip(reversed(indexes), reversed(before), strict=True):
        if not sums >> rest & 1:
            taken.append(index)
            rest -= weights[index]
    return sorted(taken)


def _fullest_bins(
    weights: Sequence[int], order: Sequence[int], room: int, seed: float | None, first: int
) -> Bins:
    """Bin after bin: one weight, and the fullest filling with others.

    The first bin begins with number `first` of `order` (largest first), the next ones with the one at
    the share `seed` of those that are left; without a seed they are filled as full as it goes.
    """
    left = list(order)
    bins: Bins = []
    while left:
        begin: list[int] = []
        if not bins:
            begin = [left.pop(first)]
        elif seed is not None or weights[left[0]] > room:
            begin = [left.pop(int((seed or 0) * (len(left) - 1)))]
        free = room - sum(weights[index] for index in begin)
        taken = [left[at] for at in fullest([weights[index] for index in left], free)]
        gone = set(taken)
        left = [index for index in left if index not in gone]
        bins.append([*begin, *taken])
    return bins


def _best_fit_decreasing(weights: Sequence[int], order: Sequence[int], room: int) -> Bins:
    bins: Bins = []
    free: list[tuple[int, int]] = []
    """(room left, bin), sorted."""
    for index in order:
        at = bisect.bisect_left(free, (weights[index], -1))
        if at < len(free):
            rest, into = free.pop(at)
            bins[into].append(index)
        else:
            rest, into = room, len(bins)
            bins.append([index])
        bisect.insort(free, (rest - weights[index], into))
    return bins
