"""A session whose budget is spent ends its harness soon: none of them tries for minutes."""

import asyncio
import time

import pytest

from schemas.tasks import LimitSpec
from tests.harness.harnesses import HARNESSES
from tests.harness.proof import assert_no_key
from tests.harness.script import Scene, Script, Turn
from tests.harness.stage import Stage
from tests.unit.gateway.running import eventually

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

CALLS = 3
MOST_REFUSED = 12
"""Requests behind the end of the budget. At most: Claude Code leaves out one feature after the other."""
SOON_SECONDS = 60.0
"""On a busy machine. Behind a status that it tries again after, a harness takes minutes."""


@pytest.mark.parametrize("name", HARNESSES)
async def test_a_spent_budget_ends_a_harness(
    name: str, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    harness = HARNESSES[name]
    work = [Turn("One more look.", (harness.shell(f"echo step-{step}"),)) for step in range(20)]
    main = Scene("main", [*work, harness.last_turn()], lambda conversation: bool(conversation.tool_names))
    title = Scene("title", [Turn("Looks")], lambda _: True)
    refusals = stage.gateway.parts.proxy.refusals

    async def first_refusal() -> float:
        await eventually(lambda: refusals, 300.0)
        return time.monotonic()

    spent = asyncio.create_task(first_refusal())
    played = await stage.perform(
        harness, Script([main, title]), limits=LimitSpec(max_calls=CALLS), time_limit_seconds=300.0
    )
    seconds = time.monotonic() - await spent
    assert played.finished.status is not None, played.finished.output
    assert played.sealed_calls == CALLS == len(played.records)
    assert (sum(refusals.values()) <= MOST_REFUSED, seconds < SOON_SECONDS) == (True, True), (
        f"{name}: {dict(refusals)} in {seconds:.0f} s"
    )
    assert_no_key(played, caplog.text)
