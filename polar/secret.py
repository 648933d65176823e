"""Secrets that lie in files: the one that nodes and gateways share, and the key of the engines.

Session keys are made and checked with the first.
"""

import os
import secrets
from pathlib import Path

from polar.errors import SettingsError
from polar.settings import LogSettings


def load_secret(settings: LogSettings) -> bytes:
    """The shared secret; made (mode 0600) at DATA_DIR/secret when no file was named.

    Raises SettingsError when a named file is missing or holds fewer than 32 characters.
    """
    named = settings.secret_file
    path = named or settings.data_dir / "secret"
    if named is None:
        _create_once(path)
    try:
        text = path.read_text().strip()
    except OSError as error:
        raise SettingsError(
            f"POLAR_SECRET_FILE {path}: {error.strerror}; create it with 32 random bytes in hex"
        ) from error
    if len(text) < 32:
        raise SettingsError(
            f"POLAR_SECRET_FILE {path} holds fewer than 32 characters; use 32 random bytes in hex"
        )
    return text.encode()


def load_engine_key(path: Path | None) -> str:
    """What engines want as Bearer token; empty without a file. Raises SettingsError."""
    if path is None:
        return ""
    try:
        return path.read_text().strip()
    except OSError as error:
        raise SettingsError(
            f"POLAR_GATEWAY_ENGINE_KEY_FILE {path}: {error.strerror}; put the engines' API key into it"
        ) from error


def _create_once(path: Path) -> None:
    """Create the file whole or not at all: two services may start at the same moment."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_text(secrets.token_hex(32))
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
