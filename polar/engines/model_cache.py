"""A folder of prepared models: each is built once, whole or not at all.

Invariant: a model folder under its final name is complete. It is built beside it and renamed;
a killed build leaves only a draft that the next one removes.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from polar.settings import ProcessSettings

Progress = Callable[[str, float], None]
"""Told what is being done and the finished share, 0.0 … 1.0."""


def silent(_what: str, _share: float) -> None:
    """A progress callback that shows nothing."""


def default_cache_dir() -> Path:
    """POLAR_CACHE_DIR, else polar's folder in the user's cache directory."""
    named = ProcessSettings().cache_dir
    return named or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polar"


def built_once(cache_dir: Path, name: str, build: Callable[[Path], None]) -> Path:
    """The folder CACHE_DIR/NAME; `build(draft)` fills it first where it does not exist yet.

    Processes that ask at the same time wait for one build. Errors of `build` pass through.
    """
    final = cache_dir / name
    if final.is_dir():
        return final
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _exclusive(cache_dir / f".{name}.lock"):
        if final.is_dir():
            return final
        draft = cache_dir / f".{name}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        build(draft)
        draft.rename(final)
    return final


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
