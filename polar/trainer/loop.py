"""The trainer service: batches from the log, policies onto it.

Order of a step: train, export the weights, checkpoint, publish. Invariants: each start claims
a lineage that was never used and publishes its first version, so a version names one set of
weights; a batch is in the weights of the newest checkpoint once or not at all; a version that
a checkpoint holds and the log does not is published at the next start, under its own name.

One thread does all work on tensors; the event loop only reads and writes the log.
"""

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from polar.core.metrics import Metrics
from polar.core.staleness import PolicyLineages
from polar.kafka.outages import through_outages
from polar.kafka.reader import read_all
from polar.kafka.writer import LogWriter
from polar.settings import LogSettings, TrainerSettings
from polar.telemetry.metrics import expose
from polar.trainer.backend import MegatronBackend
from polar.trainer.batch_source import Batch, follow_batches
from polar.trainer.checkpoint import Checkpoint, CheckpointStore
from polar.trainer.offline import model_folder
from polar.trainer.policy_folders import PolicyFolders
from polar.trainer.step import train_step
from schemas.policies import PolicyPublished, PolicyVersion
from schemas.topics import POLICIES

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def serve(log: LogSettings, settings: TrainerSettings) -> None:
    """Train until `max_steps` or SIGTERM; both end it without an error.

    Raises TrainerError for a batch, checkpoint or model that is not usable, SettingsError for
    settings that cannot work. An outage of the broker is waited for.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="trainer") as pool:
        await _Trainer(log, settings, pool).run()


class _Trainer:
    def __init__(self, log: LogSettings, settings: TrainerSettings, pool: ThreadPoolExecutor) -> None:
        self._log = log
        self._settings = settings
        self._pool = pool
        output = (settings.output_dir or log.data_dir / "trainer").absolute()
        self._checkpoints = CheckpointStore(output / "checkpoints", settings.keep_checkpoints)
        self._folders = PolicyFolders(output / "policies", settings.keep_checkpoints)
        self._history: list[PolicyPublished] = []
        """Versions of this policy in log order."""
        self._lineages = PolicyLineages()

    @property
    def _head(self) -> PolicyPublished:
        """The version that the backend's weights are."""
        return self._history[-1]

    async def run(self) -> None:
        base = model_folder(self._settings)
        checkpoint = self._checkpoints.latest()
        backend = await self._in_thread(partial(self._load, base, checkpoint))
        async with LogWriter(self._log) as writer, _stopped_by_signal(backend.cancelled.set):
            await self._start(backend, writer, checkpoint)
            expose(self._metrics)
            await self._train(backend, writer, checkpoint)

    def _metrics(self) -> Metrics:
        """The last step's, as they stand in PolicyPublished."""
        head = self._head
        return {"policy_step": head.version.step, "batch_number": head.batch_number, **head.metrics}

    def _load(self, base: Path, checkpoint: Checkpoint | None) -> MegatronBackend:
        if checkpoint is None:
            logger.info("starting from the base model %s", base)
            return MegatronBackend(base, self._settings)
        logger.info("resuming after batch %d from %s", checkpoint.batch_number, checkpoint.folder)
        backend = MegatronBackend(base, self._settings, weights=checkpoint.folder)
        backend.load_optimizer_state(checkpoint.optimizer_state())
        return backend

    async def _start(
        self, backend: MegatronBackend, writer: LogWriter, checkpoint: Checkpoint | None
    ) -> None:
        """Finish an interrupted publication, then claim a lineage and publish its first version."""
        for record in await through_outages(lambda: read_all(self._log, POLICIES)):
            if isinstance(record.event, PolicyPublished) and record.event.policy == self._settings.policy:
                self._remember(record.event)
        last = None
        if checkpoint is not None:
            last = await self._in_thread(partial(self._placed, backend, checkpoint.published))
            if all(event.version != last.version for event in self._history):
                await self._publish(writer, last)
        # The random part keeps a lineage unique even if an earlier start never reached the log.
        ordinal = len({event.version.lineage for event in self._history}) + 1
        version = PolicyVersion(
            lineage=f"run-{ordinal}-{secrets.token_hex(2)}", step=last.version.step if last else 0
        )
        if last is not None:
            start = last.model_copy(update={"version": version, "parent": last.version, "metrics": {}})
        else:
            start = await self._in_thread(partial(self._describe, backend, version, None, -1, {}))
        await self._publish(writer, start)

    async def _train(
        self, backend: MegatronBackend, writer: LogWriter, checkpoint: Checkpoint | None
    ) -> None:
        batches = follow_batches(
            self._log,
            self._settings.policy,
            next_number=self._head.batch_number + 1,
            last_manifest_offset=checkpoint.manifest_offset if checkpoint else None,
        )
        async with contextlib.aclosing(batches):
            while not self._is_finished():
                batch = await anext(batches)
                published = await self._in_thread(partial(self._step, backend, batch))
                await self._publish(writer, published)
        logger.info("policy_version %s reached max_steps, ending", self._head.version)

    def _is_finished(self) -> bool:
        limit = self._settings.max_steps
        return limit is not None and self._head.version.step >= limit

    def _step(self, backend: MegatronBackend, batch: Batch) -> PolicyPublished:
        """Train a batch up to and including its checkpoint; the event to publish."""
        head, number = self._head, batch.manifest.number
        version = PolicyVersion(lineage=head.version.lineage, step=head.version.step + 1)
        metrics = train_step(
            backend,
            batch.manifest,
            batch.rows,
            version=head.version,
            staleness_of=self._lineages.staleness,
        )
        if metrics["no_op"]:
            updates = {"version": version, "parent": head.version, "batch_number": number, "metrics": metrics}
            published = head.model_copy(update=updates)
        else:
            published = self._describe(backend, version, head.version, number, metrics)
        is_unchanged = bool(metrics["no_op"]) and self._checkpoints.latest() is not None
        state = None if is_unchanged else backend.optimizer_state()
        self._checkpoints.save(published, Path(published.weights_path), state, batch.offset)
        logger.info(
            "policy_version %s: batch %d, loss %.6f, %d tokens trained",
            version,
            number,
            metrics["loss"],
            metrics["trained_tokens"],
        )
        return published

    def _describe(
        self,
        backend: MegatronBackend,
        version: PolicyVersion,
        parent: PolicyVersion | None,
        batch_number: int,
        metrics: dict[str, float],
    ) -> PolicyPublished:
        """Export the backend's weights under a version."""
        folder = self._folders.path(version)
        return PolicyPublished(
            policy=self._settings.policy,
            version=version,
            parent=parent,
            weights_path=str(folder),
            weights_sha256=backend.export(folder),
            batch_number=batch_number,
            canary=backend.canary(),
            metrics=metrics,
        )

    def _placed(self, backend: MegatronBackend, event: PolicyPublished) -> PolicyPublished:
        """The event of a checkpoint with a folder that exists, also if someone moved the data."""
        if Path(event.weights_path).is_dir():
            return event
        folder = self._folders.path(event.version)
        updates = {"weights_path": str(folder), "weights_sha256": backend.export(folder)}
        return event.model_copy(update=updates)

    async def _publish(self, writer: LogWriter, event: PolicyPublished) -> None:
        await through_outages(lambda: writer.write(event))
        logger.info("published policy_version %s, weights %s", event.version, event.weights_path)
        self._remember(event)
        await self._in_thread(partial(self._folders.prune, self._history))

    def _remember(self, event: PolicyPublished) -> None:
        self._history.append(event)
        self._lineages.add(event)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


@contextlib.asynccontextmanager
async def _stopped_by_signal(
    on_stop: Callable[[], None], signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)
) -> AsyncIterator[None]:
    """End the body quietly at a signal; a step that is under way is given up before its update."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        on_stop()
        if task is not None:
            task.cancel()

    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    except asyncio.CancelledError:
        if not stopped:
            raise
        logger.info("stopping; the next start goes on from the last checkpoint")
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
