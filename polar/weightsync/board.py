"""Which policy is the newest, for the workers that wait for one.

Invariant: nobody is given a policy before the log has been read to its end at start: the newest
one is to be loaded, not every one since the beginning.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping

from schemas.policies import PolicyPublished

_NUM_DIGESTS = 1000
"""Versions whose digest is remembered, to recognise a version with equal weights."""


class Board:
    """The newest policy of one name."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._digests: OrderedDict[str, str] = OrderedDict()
        self._newest: PolicyPublished | None = None
        self._is_open = False
        self._changed = asyncio.Event()

    @property
    def digests(self) -> Mapping[str, str]:
        """Version → weights_sha256 of the latest versions."""
        return self._digests

    def put(self, published: PolicyPublished) -> None:
        """A record in log order; those of other policies are ignored."""
        if published.policy != self._policy:
            return
        self._newest = published
        self._digests[str(published.version)] = published.weights_sha256
        if len(self._digests) > _NUM_DIGESTS:
            self._digests.popitem(last=False)
        self._wake()

    def open(self) -> None:
        """The log has been read to the end it had at start."""
        self._is_open = True
        self._wake()

    async def newest(self) -> PolicyPublished:
        """The newest policy; waits for the first one."""
        while not self._is_open or self._newest is None:
            await self._changed.wait()
        return self._newest

    async def wait_for_newer(self, than: PolicyPublished, *, timeout_seconds: float) -> None:
        """Return when there is a newer policy, or after the time-out."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._newest is than:
                    await self._changed.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
