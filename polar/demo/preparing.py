"""Prepares the demo's model in a process of its own: torch is not needed afterwards."""

import subprocess
import sys
from pathlib import Path

from polar.errors import SettingsError


def prepare_model(name: str) -> Path:
    """Folder of a built-in model (`smollm2` or `tiny`), made once and cached; progress goes to stderr.

    Raises SettingsError when it cannot be made, with the reason.
    """
    done = subprocess.run(
        [sys.executable, "-m", "polar.engines.models", name], stdout=subprocess.PIPE, check=False, text=True
    )
    if done.returncode != 0:
        raise SettingsError(f"the model {name} could not be prepared (see above); `polar doctor` says more")
    return Path(done.stdout.strip().splitlines()[-1])
