"""Free ports, chosen once and kept in DATA_DIR/ports.json, so that a restart uses the same.

Ports come from below the range from which the kernel takes those of outgoing connections:
otherwise some connection could sit on a port of ours between two starts.
"""

import json
import random
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from polar.errors import SettingsError

_RANGE = range(20000, 32000)
_KAFKA_EXTRA = 1
"""A Kafka node's controller listens on the port after the broker's."""


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def load_ports(data_dir: Path) -> dict[str, int]:
    """Ports of an earlier start; empty when there was none."""
    path = data_dir / "ports.json"
    if not path.exists():
        return {}
    return {str(name): int(port) for name, port in json.loads(path.read_text()).items()}


def reserve_ports(
    data_dir: Path, names: Iterable[str], *, fixed: Mapping[str, int] | None = None
) -> dict[str, int]:
    """A port for each name: as kept, else `fixed`, else a free one. Writes DATA_DIR/ports.json.

    Raises SettingsError when no free port is found.
    """
    ports = load_ports(data_dir)
    choice = random.SystemRandom()
    for name in names:
        if name in ports:
            continue
        if fixed and name in fixed:
            ports[name] = fixed[name]
            continue
        for _ in range(1000):
            port = choice.choice(_RANGE)
            taken = {value + extra for value in ports.values() for extra in (0, _KAFKA_EXTRA)}
            if {port, port + _KAFKA_EXTRA} & taken:
                continue
            if is_free(port) and is_free(port + _KAFKA_EXTRA):
                ports[name] = port
                break
        else:
            raise SettingsError("no free port between 20000 and 32000 on 127.0.0.1; end other servers")
    data_dir.mkdir(parents=True, exist_ok=True)
    draft = data_dir / "ports.json.new"
    draft.write_text(json.dumps(ports, indent=1, sort_keys=True) + "\n")
    draft.replace(data_dir / "ports.json")
    return ports
