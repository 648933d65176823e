"""What a demo is to do. Kept in its data directory: going on needs nothing but that."""

import json
import secrets
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from polar.demo.pacing import Plan
from polar.errors import SettingsError
from polar.settings import LogSettings
from polar.supervision.lock import lock_owner

_NAME = "demo-options.json"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """One demo."""

    data_dir: Path
    """Absolute."""
    topic_prefix: str = "polar"
    """Of its own, so that runs on a shared broker do not see one another."""
    quick: bool = False
    seed: int = 2
    steps: int | None = None
    """None: 6, or 2 with `quick`."""
    max_staleness: int = 0
    kafka_home: Path | None = None
    bootstrap_servers: str | None = None
    reward: Path | None = None
    """A reward program (a file run by Python) instead of the node's evaluator."""
    time_limit_seconds: float = 1800.0

    @property
    def plan(self) -> Plan:
        """What the driver does."""
        return Plan(
            seed=self.seed,
            steps=self.steps if self.steps is not None else (2 if self.quick else 6),
            max_staleness=self.max_staleness,
            stop_when_solved=not self.quick,
        )

    @property
    def kind(self) -> Literal["letters", "shop"]:
        """Which task and agent."""
        return "letters" if self.quick else "shop"


def resolve_options(data_dir: Path | None, *, fresh: bool, quick: bool, **given: Any) -> DemoOptions:
    """Options of a new demo, or those kept in `data_dir` with what is given anew.

    None among `given` means: as kept, else the default. Raises SettingsError when a full demo's
    data directory is to go on as a quick one.
    """
    folder = (data_dir or _new_folder()).absolute()
    if fresh and folder.exists():
        _empty(folder)
    kept = _load(folder)
    if quick and kept and not kept["quick"]:
        raise SettingsError(f"{folder} holds a full demo; leave --quick out, or add --fresh")
    values = {
        "topic_prefix": f"polar-demo-{secrets.token_hex(4)}",
        **kept,
        **{name: value for name, value in given.items() if value is not None},
        "quick": quick or bool(kept.get("quick")),
    }
    for name in ("kafka_home", "reward"):
        if values.get(name) is not None:
            values[name] = Path(values[name]).absolute()
    options = DemoOptions(data_dir=folder, **values)
    _keep(options)
    return options


def _new_folder() -> Path:
    return LogSettings().data_dir / "demo" / time.strftime("%Y%m%d-%H%M%S")


def _empty(folder: Path) -> None:
    """Remove an earlier demo; refuse to touch a folder that is none, or one that is in use."""
    for name in ("demo", "up"):
        if (owner := lock_owner(folder, name)) is not None:
            raise SettingsError(f"--fresh: {folder} is in use by process {owner}")
    if any(folder.iterdir()) and not (folder / _NAME).exists():
        raise SettingsError(f"--fresh: {folder} holds no demo, so nothing there is removed")
    shutil.rmtree(folder)


def _load(folder: Path) -> dict[str, Any]:
    path = folder / _NAME
    if not path.exists():
        return {}
    kept: dict[str, Any] = json.loads(path.read_text())
    return kept


def _keep(options: DemoOptions) -> None:
    values = {name: value for name, value in asdict(options).items() if name != "data_dir"}
    options.data_dir.mkdir(parents=True, exist_ok=True)
    draft = options.data_dir / f"{_NAME}.new"
    draft.write_text(json.dumps(values, default=str, indent=1) + "\n")
    draft.replace(options.data_dir / _NAME)
