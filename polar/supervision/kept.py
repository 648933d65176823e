"""DATA_DIR/deployment.json: what a data directory's deployment is, for later starts and for others."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polar.errors import SettingsError
from polar.settings import LogSettings

_NAME = "deployment.json"


@dataclass(frozen=True, slots=True)
class KeptDeployment:
    """What the last `polar up` on a data directory ran."""

    external: str = ""
    """Bootstrap servers of a Kafka that it did not start itself; empty otherwise."""
    kafka_home: str = ""
    relay: bool = False
    chosen: Mapping[str, str] = field(default_factory=dict)
    """POLAR_* variables that a user set, then or earlier."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """All POLAR_* variables that the services got."""


def load_deployment(data_dir: Path) -> KeptDeployment:
    """What was kept; defaults where `polar up` never ran."""
    path = data_dir / _NAME
    if not path.exists():
        return KeptDeployment()
    return KeptDeployment(**json.loads(path.read_text()))


def log_settings_of(data_dir: Path) -> LogSettings:
    """How to reach the log of the deployment on this data directory.

    Raises SettingsError when `polar up` never ran there.
    """
    settings = load_deployment(data_dir).settings
    if not settings:
        raise SettingsError(
            f"no deployment in {data_dir}: give the --data-dir of a `polar up` or `polar demo`"
        )
    values: dict[str, Any] = {
        name: settings[variable]
        for name in LogSettings.model_fields
        if (variable := f"POLAR_{name.upper()}") in settings
    }
    return LogSettings(**values)


def keep_deployment(data_dir: Path, deployment: KeptDeployment) -> None:
    """Write it whole or not at all."""
    draft = data_dir / f"{_NAME}.new"
    draft.write_text(json.dumps(asdict(deployment), indent=1, sort_keys=True) + "\n")
    draft.replace(data_dir / _NAME)
