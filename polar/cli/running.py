"""Runs a service's coroutine to its orderly end."""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any


def run_service(main: Coroutine[Any, Any, Any]) -> None:
    """Run until it ends by itself, or cancel it on SIGTERM and SIGINT; then return quietly.

    A service that handles the signals itself (uvicorn, FastStream) replaces these handlers.
    """
    try:
        import uvloop
    except ImportError:  # no wheel for this platform: the standard loop does the same, slower
        new_loop = asyncio.new_event_loop
    else:
        new_loop = uvloop.new_event_loop

    async def guarded() -> None:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(guarded())
