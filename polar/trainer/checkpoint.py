"""Checkpoints: weights, optimizer state and the policy event that they stand for.

Invariant: a checkpoint folder is complete once it has its name, and loading the newest gives
exactly the next steps that the process which wrote it would have taken. The position on the
log is the batch number inside the record, not a broker offset.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from polar.errors import TrainerError
from polar.trainer.hf_weights import WEIGHTS_FILE, publish_folder
from schemas.policies import PolicyPublished

logger = logging.getLogger(__name__)

_OPTIMIZER_FILE = "optimizer.pt"
_STATE_FILE = "state.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    """Holds the weights as model.safetensors."""
    published: PolicyPublished
    """The event of these weights: version, last batch, metrics. Written to the log after the
    checkpoint, so a trainer that died in between writes it at its next start."""
    manifest_offset: int | None
    """Where the manifest of the last batch stood on the log: a hint where to read on."""

    @property
    def batch_number(self) -> int:
        """The last batch trained; -1 before the first."""
        return self.published.batch_number

    def optimizer_state(self) -> dict[str, Any]:
        """What MegatronBackend.optimizer_state gave. Raises TrainerError when it is not readable."""
        try:
            state: dict[str, Any] = torch.load(self.folder / _OPTIMIZER_FILE, weights_only=True)
        except (OSError, RuntimeError, LookupError, ValueError, EOFError, UnpicklingError) as error:
            raise TrainerError(f"{self.folder / _OPTIMIZER_FILE}: {error}") from error
        return state


class CheckpointStore:
    """The checkpoints of one trainer in one folder, newest batch last."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = max(1, keep)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, or none. Raises TrainerError when it is not readable."""
        folders = self._complete()
        if not folders:
            return None
        path = folders[-1] / _STATE_FILE
        try:
            state = json.loads(path.read_text())
            if state["format"] != _FORMAT:
                raise TrainerError(f"{path} has format {state['format']}, this trainer reads {_FORMAT}")
            published = PolicyPublished.model_validate(state["published"])
        except (OSError, ValueError, KeyError) as error:
            raise TrainerError(f"{path}: {error}") from error
        return Checkpoint(folders[-1], published, state["manifest_offset"])

    def save(
        self,
        published: PolicyPublished,
        weights_folder: Path,
        optimizer_state: Mapping[str, Any] | None,
        manifest_offset: int | None,
    ) -> Checkpoint:
        """Write a checkpoint whole, then remove the oldest beyond `keep`.

        Weights are linked from the exported folder. `optimizer_state` none: as in the newest
        checkpoint (a step that moved nothing).
        """
        name = f"{published.batch_number + 1:08d}-{published.version.lineage}-{published.version.step}"
        draft, target = self._folder / f".{name}.draft", self._folder / name
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        link_or_copy(weights_folder / WEIGHTS_FILE, draft / WEIGHTS_FILE)
        if optimizer_state is not None:
            torch.save(dict(optimizer_state), draft / _OPTIMIZER_FILE)
        elif previous := self._complete():
            link_or_copy(previous[-1] / _OPTIMIZER_FILE, draft / _OPTIMIZER_FILE)
        else:
            raise TrainerError("the first checkpoint needs the optimizer's state")
        state = {
            "format": _FORMAT,
            "manifest_offset": manifest_offset,
            "published": published.model_dump(mode="json"),
        }
        (draft / _STATE_FILE).write_text(json.dumps(state))
        publish_folder(draft, target)
        for old in self._complete()[: -self._keep]:
            shutil.rmtree(old)
        return Checkpoint(target, published, manifest_offset)

    def _complete(self) -> list[Path]:
        """Folders that were renamed into place, by batch number."""
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if path.is_dir() and path.name[0] != ".")


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for a file that is never written again; a copy across file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
