"""The rows of a batch, dealt out to data-parallel ranks with nearly equal work.

Every rank computes this by itself from the manifest, before it has read a row.
"""

import heapq

from schemas.batches import BatchManifest

TOKEN_COST = 16_384
"""Attention pairs that cost as much as the rest of a token's forward and backward pass: about six
times the hidden size of a dense transformer, here of 2,730."""


def row_work(manifest: BatchManifest, token_cost: int = TOKEN_COST) -> list[int]:
    """[row_count] work of each row, in attention pairs."""
    return [
        length * token_cost + pairs
        for length, pairs in zip(manifest.row_lengths, manifest.row_pairs, strict=True)
    ]


def rank_rows(manifest: BatchManifest, ranks: int, token_cost: int = TOKEN_COST) -> list[list[int]]:
    """Row indexes by rank, ascending; each row to one rank.

    Longest job first: no rank's work is above 4/3 of the least that is possible.
    Raises ValueError for less than one rank.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: at least one must train")
    work = row_work(manifest, token_cost)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for row in sorted(range(len(work)), key=lambda row: (-work[row], row)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(row)
        heapq.heappush(loads, (load + work[row], rank))
    return [sorted(share) for share in shares]
