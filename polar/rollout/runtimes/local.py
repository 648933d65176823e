"""Runtime `local`: a directory of its own and a process group for each command.

The environment is clean: a few variables of the node, the spec's, and what the caller gives.
HOME and TMPDIR lie in the directory.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from polar.errors import RuntimeFailedError
from polar.rollout.journal import Journal, NotedProcess
from polar.rollout.processes import CommandResult, run_command, start_time, sweep_runtime
from polar.supervision.processes import MARKER, SERVICE_MARKER
from schemas.tasks import RuntimeSpec

_PASSED_ON = frozenset(
    {
        "PATH", "LANG", "LANGUAGE", "TZ", "TERM", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH",
        "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS",
        MARKER, SERVICE_MARKER,
    }
)  # fmt: skip
"""Variables of the node that a runtime sees; those of the deployment let it be swept up."""


class LocalRuntime:
    """See `polar.rollout.runtimes.base.Runtime`."""

    def __init__(self, directory: Path, spec: RuntimeSpec, journal: Journal) -> None:
        self.directory = directory
        self._spec = spec
        self._journal = journal

    async def prepare(self, timeout_seconds: float) -> None:
        """Write the spec's files and run its `prepare` commands within one budget."""
        try:
            await asyncio.to_thread(self._write_files)
        except OSError as error:
            raise RuntimeFailedError(f"the runtime's directory cannot be made: {error}") from error
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        for number, command in enumerate(self._spec.prepare, start=1):
            left = deadline - asyncio.get_running_loop().time()
            result = await self.run(
                command, env={}, timeout_seconds=max(left, 0.001), name=f"prepare-{number}"
            )
            if result.status is None:
                raise RuntimeFailedError(
                    f"prepare command {number} was not done within timeouts.init_seconds "
                    f"({timeout_seconds:g} s)"
                )
            if result.status != 0:
                raise RuntimeFailedError(f"prepare command {number} failed, {result.words}")

    async def run(
        self, command: str, *, env: Mapping[str, str], timeout_seconds: float, name: str
    ) -> CommandResult:
        """See Runtime. `env` goes over the spec's variables."""
        try:
            return await run_command(
                command,
                directory=self.directory,
                env=self._environment(env),
                timeout_seconds=timeout_seconds,
                name=name,
                on_start=self._note,
                on_end=self._journal.remove_process,
            )
        except OSError as error:
            raise RuntimeFailedError(f"{name} could not be started: {error}") from error

    async def close(self) -> None:
        """See Runtime."""
        await sweep_runtime(self.directory)

    async def remove(self) -> None:
        """See Runtime."""
        await self.close()
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)

    def _write_files(self) -> None:
        (self.directory / "tmp").mkdir(parents=True)
        for name, text in self._spec.files.items():
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        passed = {
            name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith("LC_")
        }
        own = {"HOME": str(self.directory), "TMPDIR": str(self.directory / "tmp")}
        return {**passed, **own, **self._spec.env, **env}

    def _note(self, pid: int) -> None:
        # A process that is gone already left nothing to find again.
        if (started := start_time(pid)) is not None:
            self._journal.add_process(NotedProcess(pid, started, str(self.directory)))


async def end_leftovers(journal: Journal, runtimes: Path) -> None:
    """Kill what an earlier life of the node left running."""
    for process in journal.processes():
        if start_time(process.pid) == process.started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, 9)
    await sweep_runtime(runtimes)
    for process in journal.processes():
        journal.remove_process(process.pid)
