"""Bin packing: few bins, each as full as it can be, so that what is left over lies in the last ones.

Deterministic: equal weights keep their order.
"""

import bisect
from collections.abc import Sequence

_WINDOW = 256
"""Weights that one exact filling looks at: half of them the largest, half the smallest."""


def fill_bins(weights: Sequence[int], room: int) -> list[list[int]]:
    """Indexes of `weights` by bin; the sum of a bin is at most `room`.

    A weight above `room` gets a bin of its own. No two bins could be one. Each bin in turn takes
    the largest weight that is left and the fullest filling of the rest; where best fit
    decreasing needs fewer bins, its bins are taken.
    """
    if not weights:
        return []
    if sum(weights) <= room:
        return [list(range(len(weights)))]
    order = sorted(range(len(weights)), key=lambda index: -weights[index])
    fullest = _fullest_first(weights, order, room)
    least = -(-sum(weights) // room) if room > 0 else len(weights)
    if len(fullest) <= least:
        return fullest
    best_fit = _best_fit_decreasing(weights, order, room)
    return best_fit if len(best_fit) < len(fullest) else fullest


def fullest(weights: Sequence[int], room: int) -> list[int]:
    """Indexes of a subset with the largest sum that is at most `room`; exact.

    Subset sums are the bits of one integer: a shift and an OR a weight.
    """
    if sum(weights) <= room:
        return list(range(len(weights)))
    if room <= 0 or min(weights) > room:
        return []
    mask = (1 << (room + 1)) - 1
    reach, before = 1, []
    for weight in weights:
        before.append(reach)
        if weight <= room:
            reach |= (reach << weight) & mask
    rest = reach.bit_length() - 1
    taken = []
    for index in range(len(weights) - 1, -1, -1):
        if not before[index] >> rest & 1:
            taken.append(index)
            rest -= weights[index]
    return taken[::-1]


def _fullest_first(weights: Sequence[int], order: Sequence[int], room: int) -> list[list[int]]:
    left = list(order)
    bins: list[list[int]] = []
    while left:
        first, left = left[0], left[1:]
        free = room - weights[first]
        taken: list[int] = []
        if left and weights[left[-1]] <= free:
            is_wide = len(left) > _WINDOW
            window = [*left[: _WINDOW // 2], *left[-_WINDOW // 2 :]] if is_wide else left
            taken = [window[at] for at in fullest([weights[index] for index in window], free)]
            gone = set(taken)
            left = [index for index in left if index not in gone]
            free -= sum(weights[index] for index in taken)
            # What the window did not show may still fit.
            for index in left if is_wide else ():
                if weights[index] <= free:
                    taken.append(index)
                    free -= weights[index]
            gone = set(taken)
            left = [index for index in left if index not in gone]
        bins.append([first, *taken])
    return bins


def _best_fit_decreasing(weights: Sequence[int], order: Sequence[int], room: int) -> list[list[int]]:
    bins: list[list[int]] = []
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
