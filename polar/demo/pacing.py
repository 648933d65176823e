"""When the demo submits which task: a pure fold over the log.

Step k trains on groups that the policy of step k - max_staleness (or a newer one) sampled, so its
tasks are submitted once the engines run that policy. All state is read from the log: a demo that
was killed folds it again and goes on where it stopped. Task ids are a function of the state, so
submitting one twice is one task.
"""

from dataclasses import dataclass, field

from polar.demo.tasks import task_id
from schemas.base import Event
from schemas.batches import BatchManifest
from schemas.engines import EngineState
from schemas.policies import PolicyPublished
from schemas.tasks import RolloutTask

FULL_REWARD = 0.999


@dataclass(frozen=True, slots=True)
class Plan:
    """What the demo is to do."""

    seed: int
    steps: int
    """Batches at most."""
    groups_per_batch: int = 3
    max_staleness: int = 0
    stop_when_solved: bool = True
    """Stop after two batches in a row with the full reward."""


@dataclass(slots=True)
class Progress:
    """The fold. Feed it every event of tasks, batches, policies and engines, then ask."""

    plan: Plan
    manifests: dict[int, BatchManifest] = field(default_factory=dict)
    submitted: dict[str, RolloutTask] = field(default_factory=dict)
    batch_of: dict[str, int] = field(default_factory=dict)
    """Policy version → last batch trained into it."""
    trained_batch: int = -1
    engine_version: str = ""

    def on_event(self, event: Event) -> None:
        """Fold one event in; other types are ignored."""
        match event:
            case RolloutTask():
                self.submitted.setdefault(event.task_id, event)
            case BatchManifest():
                self.manifests.setdefault(event.number, event)
            case PolicyPublished():
                self.batch_of[str(event.version)] = event.batch_number
                self.trained_batch = max(self.trained_batch, event.batch_number)
            case EngineState(status="ready", version=version) if version is not None:
                self.engine_version = str(version)
            case _:
                pass

    @property
    def engine_batch(self) -> int | None:
        """Last batch trained into the weights that the engine runs; none before the first load."""
        return self.batch_of.get(self.engine_version)

    @property
    def rewards(self) -> list[float]:
        """Mean reward a batch, in order of batches; batches without a scored member left out."""
        ordered = (self.manifests[number] for number in sorted(self.manifests))
        return [batch.mean_reward for batch in ordered if batch.mean_reward is not None]

    @property
    def target_batches(self) -> int:
        """Batches that the demo ends with: all, or up to the second full one in a row."""
        if self.plan.stop_when_solved:
            for number in range(1, self.plan.steps):
                pair = (self.manifests.get(number - 1), self.manifests.get(number))
                if all(batch is not None and (batch.mean_reward or 0.0) >= FULL_REWARD for batch in pair):
                    return number + 1
        return self.plan.steps

    def wanted_tasks(self) -> list[tuple[int, int]]:
        """(step, index) of the tasks to submit now."""
        if self.engine_batch is None:
            return []
        consumed: set[str] = set()
        packed = 0
        for batch in self.manifests.values():
            consumed.update(batch.groups, (item.id for item in batch.excluded))
            packed += len(batch.groups)
        per_step: dict[int, int] = {}
        for name in self.submitted:
            step = _step_of(name, self.plan.seed)
            if step is not None:
                per_step[step] = per_step.get(step, 0) + 1
        outstanding = len(self.submitted.keys() - consumed)
        allowed = min(self.target_batches, self.engine_batch + 2 + self.plan.max_staleness)
        wanted = []
        for supply in range(packed + outstanding, allowed * self.plan.groups_per_batch):
            step = supply // self.plan.groups_per_batch
            index = per_step.get(step, 0)
            per_step[step] = index + 1
            wanted.append((step, index))
        return wanted

    @property
    def is_done(self) -> bool:
        """All batches are trained and the engine runs the weights of the last one."""
        last = self.target_batches - 1
        return self.trained_batch >= last and self.engine_batch is not None and self.engine_batch >= last


def _step_of(name: str, seed: int) -> int | None:
    prefix = task_id(seed, 0, 0).rsplit("-", 2)[0] + "-"
    if not name.startswith(prefix):
        return None
    step = name[len(prefix) :].split("-", 1)[0]
    return int(step) if step.isdigit() else None
