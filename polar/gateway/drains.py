"""Which engines drain, kept in a small file: a gateway that restarts sends them no calls again.

An engine is known by its name and its URL: another server under an old name does not drain.
"""

import json
import logging
import os
from pathlib import Path

from polar.gateway.engines import EnginePool, EngineSlot

logger = logging.getLogger(__name__)


class Drains:
    """The draining engines of one gateway."""

    def __init__(self, path: Path, engines: EnginePool) -> None:
        """Begin with what the file at `path` says, where there is one."""
        self._path = path
        self._engines = engines
        for engine_id, url in self._read().items():
            slot = engines.slots.get(engine_id)
            if slot is not None and slot.client.url == url:
                engines.drain(engine_id, is_draining=True)

    def set(self, engine_id: str, *, is_draining: bool) -> EngineSlot | None:
        """Send new calls elsewhere, or no longer; None when there is no such engine here.

        Raises OSError when it cannot be kept; then nothing has changed.
        """
        slots = self._engines.slots
        if engine_id not in slots:
            return None
        drain = {name for name, slot in slots.items() if slot.is_draining and name != engine_id}
        if is_draining:
            drain.add(engine_id)
        self._write({name: slots[name].client.url for name in sorted(drain)})
        return self._engines.drain(engine_id, is_draining=is_draining)

    def _read(self) -> dict[str, str]:
        try:
            kept = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read, no engine drains: %s", self._path, error)
            return {}
        return kept if isinstance(kept, dict) else {}

    def _write(self, kept: dict[str, str]) -> None:
        draft = self._path.with_suffix(".new")
        with draft.open("w") as file:
            json.dump(kept, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
