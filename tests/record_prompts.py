"""Prompts of recorded calls, put together again from their deltas."""

from collections.abc import Iterable

from schemas.calls import CallRecord


def whole_prompts(records: Iterable[CallRecord]) -> dict[int, list[int]]:
    """Prompt ids by seq."""
    prompts: dict[int, list[int]] = {}
    paths: dict[int, list[int]] = {}
    for record in records:
        base = [] if record.prompt.base_call is None else paths[record.prompt.base_call]
        prompts[record.seq] = [*base[: record.prompt.kept], *record.prompt.new_ids]
        paths[record.seq] = [*prompts[record.seq], *record.sampled_ids]
    return prompts
