"""One fsync at a time, shared by all who wait for one, in a thread of its own.

| waits for | who unblocks it |
|---|---|
| who asked | the end of an fsync that began after the question |
| who asked while one ran | the end of that one, then of the next |
| who lets it go first | the same, or a time that is short |

A plain thread and a queue, since a call waits: an executor's way there and back takes as long as a disk.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

_Answers = list["asyncio.Future[None]"]
_Order = tuple[asyncio.AbstractEventLoop, _Answers]


class SharedSync:
    """Belongs to one event loop; the thread waits for the disk."""

    def __init__(self, sync: Callable[[], None]) -> None:
        """`sync` blocks until everything that was written before is on the disk. May raise OSError."""
        self._sync = sync
        self._asked: _Answers = []
        """Too late for the fsync that runs."""
        self._running: asyncio.Future[None] | None = None
        """Done when the fsync that runs has ended, however it did."""
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        """At most one; None ends the thread."""
        self._thread: threading.Thread | None = None

    def ask(self) -> asyncio.Future[None]:
        """Done once what is written by now is on the disk, or with OSError. Nobody has to wait for it."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        if self._running is None:
            self._begin()
        return answer

    async def let_go_first(self, seconds: float) -> None:
        """Wait for the fsync that runs, if one does, at most so long."""
        if self._running is not None:
            await asyncio.wait((self._running,), timeout=seconds)

    async def close(self) -> None:
        """Wait for what was asked, then end the thread."""
        while self._running is not None:
            await asyncio.wait((self._running,))
        if self._thread is not None:
            self._thread = None
            self._orders.put(None)

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        asked, self._asked = self._asked, []
        self._running = loop.create_future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="fsync", daemon=True)
            self._thread.start()
        self._orders.put((loop, asked))

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            loop, asked = order
            error: Exception | None = None
            try:
                self._sync()
            except OSError as caught:
                error = caught
            except Exception as caught:
                logger.exception("an fsync failed by no fault of the disk")
                error = caught  # the thread lives on: who asks next would wait for ever
            loop.call_soon_threadsafe(self._end, asked, error)

    def _end(self, asked: _Answers, error: Exception | None) -> None:
        if self._running is not None:
            self._running.set_result(None)
            self._running = None
        if self._asked:
            self._begin()
        for answer in asked:
            if answer.done():
                continue
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)
                answer.exception()  # noticed: who asked may have gone by the broker
