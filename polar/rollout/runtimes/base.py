"""What a runtime is to the rest of the node."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from polar.rollout.processes import CommandResult


class Runtime(Protocol):
    """A box that runs commands; used by one session at most."""

    directory: Path
    """Its own directory, as the node sees it."""

    async def prepare(self, timeout_seconds: float) -> None:
        """Make it READY. Raises RuntimeFailedError."""

    async def run(
        self, command: str, *, env: Mapping[str, str], timeout_seconds: float, name: str
    ) -> CommandResult:
        """Run a command to its end, or until the time is over. Raises RuntimeFailedError.

        Nothing that it started is alive afterwards, also when the call is cancelled.
        """

    async def close(self) -> None:
        """End everything in it; its directory stays."""

    async def remove(self) -> None:
        """Close it and remove its directory."""
