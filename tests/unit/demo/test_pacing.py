"""The demo submits a step's tasks when the policy of that step is in the engines, and knows its end."""

from polar.demo.pacing import Plan, Progress
from polar.demo.tasks import make_task, task_id
from schemas.batches import BatchManifest
from schemas.engines import EngineState
from schemas.policies import PolicyPublished, PolicyVersion
from schemas.tasks import RolloutTask
from schemas.trees import ListedItem


def published(step: int, batch: int, lineage: str = "a") -> PolicyPublished:
    return PolicyPublished(
        policy="policy",
        version=PolicyVersion(lineage=lineage, step=step),
        weights_path="w",
        weights_sha256="0",
        batch_number=batch,
    )


def loaded(step: int, lineage: str = "a", status: str = "ready") -> EngineState:
    return EngineState(
        engine_id="engine-0",
        url="u",
        policy="policy",
        version=PolicyVersion(lineage=lineage, step=step),
        status=status,
    )


def batch(
    number: int, reward: float = 0.5, *, groups: list[str] | None = None, stale: str = ""
) -> BatchManifest:
    names = groups if groups is not None else [task_id(2, number, index) for index in range(3)]
    return BatchManifest(
        policy="policy",
        number=number,
        groups=tuple(names),
        live_groups=tuple(names),
        excluded=(ListedItem(id=stale, reason="stale"),) if stale else (),
        policy_version=None,
        builder="prefix_merging",
        row_tokens=1,
        row_count=0,
        rows_digest="",
        row_lengths=(),
        row_pairs=(),
        live_rollouts=1,
        trained_tokens=0,
        mean_reward=reward,
        algorithm="1",
    )


def submit(progress: Progress) -> list[tuple[int, int]]:
    wanted = progress.wanted_tasks()
    for step, index in wanted:
        name = task_id(progress.plan.seed, step, index)
        spec = make_task("shop", seed=2, step=step, index=index, journal="j", reward_program=False)
        progress.on_event(RolloutTask(task_id=name, spec=spec))
    return wanted


def test_nothing_is_submitted_before_the_engine_runs_a_published_policy() -> None:
    progress = Progress(Plan(seed=2, steps=2))
    assert progress.wanted_tasks() == []
    progress.on_event(published(0, -1))
    progress.on_event(loaded(0, status="failed"))
    assert progress.wanted_tasks() == []
    progress.on_event(loaded(0))
    assert submit(progress) == [(0, 0), (0, 1), (0, 2)]
    assert progress.wanted_tasks() == []


def test_the_next_step_waits_for_its_policy_in_the_engine() -> None:
    progress = Progress(Plan(seed=2, steps=2))
    for event in (published(0, -1), loaded(0)):
        progress.on_event(event)
    submit(progress)
    progress.on_event(batch(0))
    progress.on_event(published(1, 0))
    assert progress.wanted_tasks() == []
    progress.on_event(loaded(1))
    assert submit(progress) == [(1, 0), (1, 1), (1, 2)]
    progress.on_event(batch(1))
    progress.on_event(published(2, 1))
    assert not progress.is_done
    progress.on_event(loaded(2))
    assert progress.is_done
    assert progress.wanted_tasks() == []


def test_staleness_lets_sampling_run_ahead() -> None:
    progress = Progress(Plan(seed=2, steps=4, max_staleness=1))
    for event in (published(0, -1), loaded(0)):
        progress.on_event(event)
    assert len(submit(progress)) == 6


def test_a_restart_folds_to_the_same_state_and_goes_on_in_the_new_lineage() -> None:
    progress = Progress(Plan(seed=2, steps=3))
    for event in (published(0, -1), loaded(0)):
        progress.on_event(event)
    submit(progress)
    for event in (batch(0), published(1, 0), published(1, 0, lineage="b"), loaded(1, lineage="b")):
        progress.on_event(event)
    again = Progress(Plan(seed=2, steps=3))
    # Topics have no order among them: tasks may come last.
    events = [*progress.manifests.values(), published(0, -1), published(1, 0, lineage="b")]
    for event in [*events, loaded(1, lineage="b"), *reversed(progress.submitted.values())]:
        again.on_event(event)
    assert again.wanted_tasks() == progress.wanted_tasks() == [(1, 0), (1, 1), (1, 2)]


def test_an_excluded_group_is_made_up_for_by_one_more_task() -> None:
    progress = Progress(Plan(seed=2, steps=1))
    for event in (published(0, -1), loaded(0)):
        progress.on_event(event)
    submit(progress)
    progress.on_event(batch(7, groups=[], stale=task_id(2, 0, 1)))
    assert submit(progress) == [(0, 3)]


def test_two_full_batches_in_a_row_end_the_demo_early() -> None:
    progress = Progress(Plan(seed=2, steps=10))
    for number, reward in enumerate([0.2, 1.0, 0.9, 1.0, 1.0]):
        assert progress.target_batches == 10
        progress.on_event(batch(number, reward))
    assert progress.target_batches == 5
    assert (
        Progress(Plan(seed=2, steps=10, stop_when_solved=False), dict(progress.manifests)).target_batches
        == 10
    )
