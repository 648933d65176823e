"""Cycles are collected in quiet moments, and under load after a while."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from polar.gateway import garbage


class Node:
    """Something that a weak reference can tell the end of."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def calmed() -> Iterator[None]:
    """The collector as a gateway has it."""
    garbage.calm()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("calmed")
@pytest.mark.parametrize(("is_idle", "looks"), [(True, 6), (False, 60)])
async def test_cycles_go_when_nothing_is_in_flight_and_at_the_latest_after_a_while(
    monkeypatch: pytest.MonkeyPatch, *, is_idle: bool, looks: int
) -> None:
    gone = weakref.ref(Node())
    seen = []

    async def sleep(_: float) -> None:
        seen.append(gone() is not None)
        if len(seen) > 60:
            raise TimeoutError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    kept = [[] for _ in range(100_000)]
    with pytest.raises(TimeoutError):
        await garbage.sweep_when_idle(lambda: is_idle)
    assert len(kept) == 100_000
    assert seen.index(False) == looks
