"""Reward programs as a consumer of trajectories.

Trajectories are read from their beginning; what these programs have scored already (by reward
id) is skipped, so a program may be stopped, killed and started at any time. A function that
raises, hangs or returns nonsense is logged and its trajectory listed among the dead letters; it
stops nothing else. At most `MAX_AT_ONCE` trajectories are being scored; at the limit reading
waits.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

from polar.core.stage import Emit, LogRecord, Partition
from polar.errors import LogUnavailableError
from polar.kafka.outages import through_outages
from polar.kafka.reader import end_offsets, follow, read_all
from polar.kafka.writer import LogWriter
from polar.rewards.program import RewardProgram, load_programs
from polar.rewards.view import TrajectoryView
from polar.settings import LogSettings
from schemas.base import encode
from schemas.dead_letters import DeadLetter
from schemas.rewards import Reward
from schemas.topics import REWARDS, TRAJECTORIES
from schemas.trajectories import Trajectory

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 16


def run(paths: Sequence[str | Path], log: LogSettings | None = None) -> None:
    """Score trajectories with the reward programs of these files until SIGTERM or SIGINT.

    `log`: how to reach the broker; default: from the environment. Raises SettingsError.
    """
    if not logging.getLogger().handlers:
        from polar.telemetry.logs import configure

        configure("reward-program")
    programs = [program for path in paths for program in load_programs(Path(path))]
    asyncio.run(_until_signal(programs, log or LogSettings()))


async def _until_signal(programs: Sequence[RewardProgram], log: LogSettings) -> None:
    working = asyncio.create_task(serve(programs, log))
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, working.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def serve(programs: Sequence[RewardProgram], log: LogSettings) -> None:
    """The same as a coroutine; runs until cancelled."""
    async with LogWriter(log) as writer:
        scoring = Scoring(programs, writer)
        ends = {partition: end for partition, end in (await end_offsets(log, TRAJECTORIES)).items() if end}
        scoring.skip(await read_all(log, REWARDS), ends)
        logger.info(
            "scoring trajectories: %s",
            ", ".join(f"{'+'.join(p.names)} by {p.evaluator} {p.version}" for p in programs),
        )
        try:
            async with contextlib.aclosing(follow(log, TRAJECTORIES)) as records:
                async for record in records:
                    await scoring.on_record(record)
        finally:
            scoring.cancel()


class Scoring:
    """Trajectories in, rewards out; bounded, and one failure is one failure."""

    def __init__(self, programs: Sequence[RewardProgram], writer: LogWriter) -> None:
        self._programs = tuple(programs)
        self._writer = writer
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._scored: set[str] = set()
        """Reward ids of these programs that were on the log at the start."""
        self._behind: dict[Partition, int] = {}
        """Partition → end offset at the start, until it was reached."""

    def skip(self, rewards: Sequence[LogRecord], ends: dict[Partition, int]) -> None:
        """What is scored already among the trajectories below `ends` is not scored again."""
        mine = {(program.evaluator, program.version) for program in self._programs}
        self._behind = ends
        self._scored = {
            record.event.reward_id
            for record in rewards
            if isinstance(record.event, Reward) and (record.event.evaluator, record.event.version) in mine
        }

    async def on_record(self, record: LogRecord) -> None:
        """Begin to score one trajectory; waits while too many are being scored."""
        trajectory = record.event
        if isinstance(trajectory, Trajectory):
            view = TrajectoryView(trajectory)
            for program in self._programs:
                if trajectory.outcome in program.outcomes and not self._is_scored(program, trajectory):
                    await self._slots.acquire()
                    task = asyncio.create_task(self._score(program, view, record))
                    self._tasks.add(task)
                    task.add_done_callback(self._done)
        if record.offset + 1 >= self._behind.get(record.partition, record.offset + 2):
            del self._behind[record.partition]
            if not self._behind:
                self._scored.clear()

    async def wait(self) -> None:
        """Until nothing is being scored."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def cancel(self) -> None:
        """Give up what is being scored; it will be scored at the next start."""
        for task in self._tasks:
            task.cancel()

    def _is_scored(self, program: RewardProgram, trajectory: Trajectory) -> bool:
        def has(name: str, *call_ids: str) -> bool:
            return program.reward_id(trajectory.session_id, name, *call_ids) in self._scored

        calls = [call.call_id for call in trajectory.calls]
        return all(
            has(name) or (bool(calls) and all(has(name, call_id) for call_id in calls))
            for name in program.names
        )

    async def _score(self, program: RewardProgram, view: TrajectoryView, record: LogRecord) -> None:
        work = asyncio.ensure_future(program.function(view))
        try:
            done, _ = await asyncio.wait({work}, timeout=program.timeout_seconds)
        finally:
            work.cancel()
        if not done:
            await self._refuse(
                program, record, "reward_timeout", f"not done in {program.timeout_seconds:g} s"
            )
            return
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is not None:
            logger.error("%s failed on %s", program.evaluator, view.session_id, exc_info=error)
            await self._refuse(program, record, "reward_failed", repr(error))
            return
        try:
            rewards = program.rewards(view, work.result())
        except ValueError as invalid:
            await self._refuse(program, record, "reward_invalid", str(invalid))
            return
        if rewards:
            await through_outages(lambda: self._writer.write_many([Emit(event) for event in rewards]))

    async def _refuse(self, program: RewardProgram, record: LogRecord, reason: str, detail: str) -> None:
        logger.warning("%s: %s has no score from it: %s %s", program.evaluator, record.key, reason, detail)
        letter = DeadLetter(
            source_topic=record.partition.topic,
            source_partition=record.partition.number,
            source_offset=record.offset,
            stage=f"reward-program {program.evaluator}",
            reason=reason,
            detail=detail,
        )
        with contextlib.suppress(LogUnavailableError):
            await self._writer.write_dead_letter(letter, record.key.encode(), encode(record.event))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a reward was not written", exc_info=error)
