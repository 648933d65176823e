"""One run of a harness on the real gateway and the scripted engine, and what it left behind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.calls import CallRecord
from schemas.tasks import LimitSpec
from tests.harness.harnesses import Harness, Launch
from tests.harness.running import Finished, run, scrubbed
from tests.harness.script import Script
from tests.harness.scripted_engine import EngineCall, ScriptedEngine
from tests.unit.gateway.running import SESSION, RunningGateway

TASK = "Create a.txt containing hello and b.txt containing world, then say that they are there."
DUMMY_KEY = "no-session-key"

Commands = Callable[[str], list[str]]
"""Name of a harness → the command that starts it; skips the test where it cannot be installed."""


@dataclass(frozen=True, slots=True)
class Performance:
    """What a run left behind."""

    finished: Finished
    folder: Path
    """The working copy."""
    calls: list[EngineCall]
    """As the engine saw them, in order of arrival."""
    records: list[CallRecord]
    """In order of seq."""
    sealed_calls: int
    secret: str
    """The session's key: stands nowhere."""

    def assert_ended(self, harness: Harness) -> None:
        """The harness says that it succeeded; some say so and do not exit."""
        finished = self.finished
        assert finished.status == 0 or (harness.lingers and finished.lingered), finished.output


class Stage:
    """See the module."""

    def __init__(
        self, gateway: RunningGateway, engine: ScriptedEngine, folder: Path, commands: Commands
    ) -> None:
        self.gateway = gateway
        self.engine = engine
        self._commands = commands
        self._home = folder / "home"
        self.folder = folder / "work"
        """The working copy."""

    async def perform(
        self,
        harness: Harness,
        script: Script,
        *,
        task: str = TASK,
        time_limit_seconds: float = 180.0,
        context_tokens: int = 131072,
        options: Mapping[str, str] | None = None,
        limits: LimitSpec | None = None,
    ) -> Performance:
        """Open a session, run the harness in it to its end, seal it."""
        command = self._commands(harness.name)
        self.engine.script = script
        key = await self.gateway.open(limits=limits or LimitSpec())
        home, work = self._home, self.folder
        home.mkdir()
        work.mkdir()
        launch = Launch(
            url=f"{self.gateway.url}/s/{key}" if harness.has_key_in_url else self.gateway.url,
            key=DUMMY_KEY if harness.has_key_in_url else key,
            task=task,
            home=home,
            folder=work,
            context_tokens=context_tokens,
            options=options or {},
        )
        arguments, own = harness.prepare(launch)
        finished = await run(
            [*command, *arguments],
            scrubbed(home) | own,
            work,
            time_limit_seconds,
            lambda: harness.lingers and script.is_over,
        )
        sealed = await self.gateway.seal(SESSION)
        await self.gateway.parts.sender.drained()
        records = sorted(self.gateway.log.calls(), key=lambda record: record.seq)
        return Performance(finished, work, list(self.engine.calls), records, sealed, key)
