"""The pinned harnesses, installed once into the checkout's cache and used by every later run."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from polar.engines.model_cache import built_once, default_cache_dir

_INSTALL_SECONDS = 280


class NotInstalledError(Exception):
    """A package could not be installed; the message says why."""


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A package of the npm registry with a program in it."""

    name: str
    version: str
    program: str

    def install(self, folder: Path) -> None:
        """Into an empty folder. Raises NotInstalledError."""
        if shutil.which("node") is None or shutil.which("npm") is None:
            raise NotInstalledError("no Node.js here (node and npm)")
        _run(
            ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--no-update-notifier",
             "--loglevel", "error", f"{self.name}@{self.version}"],
            f"{self.name} {self.version}",
        )  # fmt: skip

    def command(self, folder: Path) -> list[str]:
        """How it is started."""
        return [str(folder / "node_modules" / ".bin" / self.program)]


@dataclass(frozen=True, slots=True)
class PipPackage:
    """A package of PyPI in an environment of its own, with a module that is its program."""

    name: str
    version: str
    others: tuple[str, ...]
    module: str

    def install(self, folder: Path) -> None:
        """Into an empty folder. Raises NotInstalledError."""
        _run([sys.executable, "-m", "venv", str(folder)], "a virtual environment")
        _run(
            [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile",
             "--disable-pip-version-check", f"{self.name}=={self.version}", *self.others],
            f"{self.name} {self.version}",
        )  # fmt: skip

    def command(self, folder: Path) -> list[str]:
        """How it is started: as a module, since the folder was renamed after its scripts were written."""
        return [str(folder / "bin" / "python"), "-m", self.module]


PACKAGES: dict[str, NpmPackage | PipPackage] = {
    "codex": NpmPackage("@openai/codex", "0.169.0", "codex"),
    "claude": NpmPackage("@anthropic-ai/claude-code", "2.1.328", "claude"),
    "qwen": NpmPackage("@qwen-code/qwen-code", "0.24.4", "qwen"),
    "pi": NpmPackage("@mariozechner/pi-coding-agent", "0.73.1", "pi"),
    "gemini": NpmPackage("@google/gemini-cli", "0.61.0", "gemini"),
    "opencode": NpmPackage("opencode-ai", "1.18.33", "opencode"),
    "mini": PipPackage(
        "mini-swe-agent", "2.4.6", ("litellm==1.110.2", "openai==3.57.0"), "minisweagent.run.mini"
    ),
}
_failures: dict[str, NotInstalledError] = {}


def command_of(name: str) -> list[str]:
    """The command that starts a harness, installed when it is not there yet; progress goes to stderr.

    Raises NotInstalledError, in the same words each time: an installation is tried once a run.
    """
    if name in _failures:
        raise _failures[name]
    package = PACKAGES[name]
    try:
        folder = built_once(default_cache_dir(), f"harness-{name}-{package.version}", package.install)
    except NotInstalledError as error:
        _failures[name] = error
        raise
    return package.command(folder)


def _run(command: list[str], what: str) -> None:
    sys.stderr.write(f"\ninstalling {what} …")
    sys.stderr.flush()
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_INSTALL_SECONDS,
            stdin=subprocess.DEVNULL, env=os.environ | {"NO_COLOR": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"{what} took over {_INSTALL_SECONDS} s to install") from error
    sys.stderr.write(f" {time.monotonic() - started:.0f} s\n")
    if done.returncode:
        raise NotInstalledError(f"{what} cannot be installed: {done.stderr.strip()[-500:]}")
