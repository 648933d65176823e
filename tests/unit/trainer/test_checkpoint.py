"""A resumed trainer takes exactly the steps that the uninterrupted one takes."""

from pathlib import Path

import pytest

from polar.errors import TrainerError
from polar.settings import TrainerSettings
from polar.trainer.backend import MegatronBackend
from polar.trainer.checkpoint import CheckpointStore
from schemas.policies import PolicyPublished, PolicyVersion
from tests.unit.trainer.hand_batches import BASE, batch

pytestmark = pytest.mark.torch

EXACT = ("loss", "grad_norm", "learning_rate", "max_logprob_gap", "trained_tokens")


def event(step: int, folder: Path, lineage: str = "run-a") -> PolicyPublished:
    return PolicyPublished(
        policy="policy",
        version=PolicyVersion(lineage=lineage, step=step),
        weights_path=str(folder),
        weights_sha256="0" * 64,
        batch_number=step - 1,
        metrics={"loss": 0.25},
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_is_exact(dtype: str, settings: TrainerSettings, tiny_folder: Path, tmp_path: Path) -> None:
    settings = settings.model_copy(update={"dtype": dtype})
    batches = [batch(n, 2 * n, 2 * n + 1)[1] for n in range(5)]
    straight = MegatronBackend(tiny_folder, settings)
    expected = [straight.train_batch(rows, BASE) for rows in batches]

    first = MegatronBackend(tiny_folder, settings)
    for rows in batches[:2]:
        first.train_batch(rows, BASE)
    first.export(tmp_path / "weights")
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store.save(event(2, tmp_path / "weights"), tmp_path / "weights", first.optimizer_state(), 17)

    latest = CheckpointStore(tmp_path / "checkpoints", keep=2).latest()
    assert latest is not None
    assert (latest.batch_number, latest.manifest_offset) == (1, 17)
    assert latest.published == event(2, tmp_path / "weights")
    second = MegatronBackend(tiny_folder, settings, weights=latest.folder)
    second.load_optimizer_state(latest.optimizer_state())
    for rows, metrics in zip(batches[2:], expected[2:], strict=True):
        again = second.train_batch(rows, BASE)
        assert {k: again[k] for k in EXACT} == {k: metrics[k] for k in EXACT}
    assert second.export(tmp_path / "b") == straight.export(tmp_path / "a")


def test_a_checkpoint_without_the_optimizer_would_resume_wrongly(
    settings: TrainerSettings, tiny_folder: Path, tmp_path: Path
) -> None:
    """The control: the test above can tell a lost optimizer state."""
    batches = [batch(n, 2 * n, 2 * n + 1)[1] for n in range(4)]
    straight = MegatronBackend(tiny_folder, settings)
    for rows in batches[:2]:
        straight.train_batch(rows, BASE)
    straight.export(tmp_path / "weights")
    bare = MegatronBackend(tiny_folder, settings, weights=tmp_path / "weights")
    for backend in (straight, bare):
        backend.train_batch(batches[2], BASE)
    assert straight.export(tmp_path / "a") != bare.export(tmp_path / "b")


def weights(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(folder.name.encode())
    return folder


def test_the_newest_batch_counts_and_the_oldest_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.latest() is None
    for step in (9, 10, 11):
        store.save(event(step, tmp_path), weights(tmp_path / f"w{step}"), {"n": step}, None)
    latest = store.latest()
    assert latest is not None
    assert latest.batch_number == 10
    assert latest.optimizer_state() == {"n": 11}
    assert (latest.folder / "model.safetensors").read_bytes() == b"w11"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_a_step_that_moved_nothing_keeps_the_optimizer_state(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    folder = weights(tmp_path / "w")
    with pytest.raises(TrainerError, match="first checkpoint"):
        store.save(event(1, folder), folder, None, None)
    store.save(event(1, folder), folder, {"n": 1}, None)
    for step in (2, 3, 4):
        store.save(event(step, folder), folder, None, None)
    latest = store.latest()
    assert latest is not None
    assert (latest.batch_number, latest.optimizer_state()) == (3, {"n": 1})


def test_a_draft_of_a_killed_process_is_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store.save(event(1, tmp_path), weights(tmp_path / "w"), {"n": 1}, None)
    draft = tmp_path / "checkpoints" / ".00000003-run-a-2.draft"
    draft.mkdir()
    (draft / "state.json").write_text("{")
    latest = store.latest()
    assert latest is not None
    assert latest.batch_number == 0


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    saved = store.save(event(1, tmp_path), weights(tmp_path / "w"), {"n": 1}, None)
    (saved.folder / "optimizer.pt").write_bytes(b"torn")
    latest = store.latest()
    assert latest is not None
    with pytest.raises(TrainerError, match=r"optimizer\.pt"):
        latest.optimizer_state()
    (saved.folder / "state.json").write_text("{")
    with pytest.raises(TrainerError, match=r"state\.json"):
        store.latest()
