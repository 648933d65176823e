"""Causal sequences → passes through the model in which a common prefix is computed once.

A hidden state depends on the tokens up to its position and on nothing else, so sequences that
begin alike share those states: members of a group share their task prompt, later calls of a
session all that came before. In lexicographic order the longest prefix that a sequence shares
with any earlier one is the one that it shares with its predecessor; it computes the tokens
beyond and attends to its whole path.

Invariant: every occurrence is predicted under exactly the tokens of its own sequence. The plan
is a function of the set of sequences, not of the rows that carried them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polar.trainer.rows import Ints, TrainedSequence


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass over t tokens in s segments with n occurrences.

    A segment is a run of neighbouring tokens; it attends to its path (the tokens of its
    sequence before it) and causally to itself.
    """

    tokens: Ints
    """[t] ids."""
    positions: Ints
    """[t] index of each token in its sequence."""
    segment_lengths: list[int]
    """[s] tokens of each segment; the sum is t."""
    path_lengths: list[int]
    """[s] keys of each segment, itself included."""
    paths: Ints
    """[sum of path_lengths] offsets in the pass of each segment's keys, in order."""
    sources: Ints
    """[n] offset in the pass whose hidden state predicts the target."""
    occurrences: Ints
    """[n] rows of `Occurrences`."""


def plan_passes(sequences: Sequence[TrainedSequence], max_tokens: int) -> list[Pass]:
    """Passes of at most `max_tokens` tokens each; a longer sequence gets a pass of its own."""
    # Big-endian bytes sort as the ids do; the occurrences make the order total.
    ordered = sorted(sequences, key=lambda s: (s.tokens.astype(">u4").tobytes(), s.occurrences.tolist()))
    passes: list[Pass] = []
    current = _Growing()
    for sequence in ordered:
        if current.size and current.size + current.new_tokens(sequence) > max_tokens:
            passes.append(current.finish())
            current = _Growing()
        current.add(sequence)
    if current.size:
        passes.append(current.finish())
    return passes


class _Growing:
    """A pass under construction."""

    def __init__(self) -> None:
        self.size = 0
        self._last_tokens: Ints = np.empty(0, dtype=np.int64)
        self._last_path: Ints = np.empty(0, dtype=np.int64)
        """Offsets in the pass of the last sequence's tokens."""
        self._tokens: list[Ints] = []
        self._positions: list[Ints] = []
        self._paths: list[Ints] = []
        self._sources: list[Ints] = []
        self._occurrences: list[Ints] = []

    def new_tokens(self, sequence: TrainedSequence) -> int:
        return len(sequence.tokens) - self._shared(sequence.tokens)

    def add(self, sequence: TrainedSequence) -> None:
        shared, length = self._shared(sequence.tokens), len(sequence.tokens)
        own = np.arange(self.size, self.size + length - shared)
        path = np.concatenate([self._last_path[:shared], own])
        if len(own):
            self._tokens.append(sequence.tokens[shared:])
            self._positions.append(np.arange(shared, length))
            self._paths.append(path)
        self._sources.append(path[sequence.sources])
        self._occurrences.append(sequence.occurrences)
        self._last_tokens, self._last_path = sequence.tokens, path
        self.size += len(own)

    def finish(self) -> Pass:
        return Pass(
            tokens=np.concatenate(self._tokens),
            positions=np.concatenate(self._positions),
            segment_lengths=[len(part) for part in self._tokens],
            path_lengths=[len(path) for path in self._paths],
            paths=np.concatenate(self._paths),
            sources=np.concatenate(self._sources),
            occurrences=np.concatenate(self._occurrences),
        )

    def _shared(self, tokens: Ints) -> int:
        """Leading tokens that the last sequence has too."""
        size = min(len(tokens), len(self._last_tokens))
        differs = np.flatnonzero(tokens[:size] != self._last_tokens[:size])
        return int(differs[0]) if len(differs) else size
