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


@pytest.mark.usefixtures("calmed")
async def test_what_lives_is_looked_at_once_and_then_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    living: list[Node] = []
    ended: list[weakref.ref[Node]] = []
    frozen, gone = [], []

    async def sleep(_: float) -> None:
        frozen.append(gc.get_freeze_count())
        if len(frozen) == 1:
            living.append(Node())
        elif len(frozen) == garbage._IDLE_LOOKS + 1:
            ended.append(weakref.ref(living.pop()))
        gone.append(bool(ended) and ended[0]() is None)
        if gone[-1] or len(frozen) > 1000:
            raise TimeoutError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(garbage, "_FULL_SWEEPS", 4)
    with pytest.raises(TimeoutError):
        await garbage.sweep_when_idle(lambda: True)
    assert frozen[garbage._IDLE_LOOKS] > frozen[garbage._IDLE_LOOKS - 1]
    assert gone.index(True) == 4 * garbage._IDLE_LOOKS
