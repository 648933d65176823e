"""Waiting for a broker that is away: the one loop for writers and readers that must not give up."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from polar.errors import LogUnavailableError

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0

Result = TypeVar("Result")


async def through_outages(attempt: Callable[[], Awaitable[Result]]) -> Result:
    """Repeat what is safe to repeat until the broker answers; LogUnavailableError never leaves.

    Writing an equal event again is safe: polar.kafka.writer joins it with the first send.
    """
    while True:
        try:
            return await attempt()
        except LogUnavailableError as error:
            logger.warning("%s; trying on", error)
            await asyncio.sleep(PAUSE_SECONDS)
