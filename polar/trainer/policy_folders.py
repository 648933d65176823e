"""Published weights on disk: one Hugging Face folder a policy version.

Invariant: a folder that one of the last versions on the log names is never removed; engines
may still be loading it.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from schemas.policies import PolicyPublished, PolicyVersion

_LEAST_KEPT = 2


class PolicyFolders:
    """The folders of one trainer."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = max(_LEAST_KEPT, keep)

    def path(self, version: PolicyVersion) -> Path:
        """Where the weights of a version are written."""
        return self._folder / f"{version.lineage}-{version.step}"

    def prune(self, published: Iterable[PolicyPublished]) -> None:
        """Remove all but the last folders that the events, in log order, name."""
        named = list(dict.fromkeys(event.weights_path for event in reversed(list(published))))
        kept = set(named[: self._keep])
        if not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            if str(path) not in kept:
                shutil.rmtree(path, ignore_errors=True)
