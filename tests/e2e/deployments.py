"""Runs `polar` as a user does, and reads what a deployment left on disk."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polar.supervision.kept import load_deployment
from polar.supervision.processes import find_marked

POLAR = (sys.executable, "-m", "polar.cli.main")


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without settings of polar, except where prepared models are."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("POLAR_") or name == "POLAR_CACHE_DIR"
    }
    return {**kept, **more}


def start(*arguments: str, log: Path, **env: str) -> subprocess.Popen[str]:
    """Start `polar ARGUMENTS`; stdout is a pipe, stderr goes to `log`."""
    with log.open("a") as stderr:
        return subprocess.Popen(
            [*POLAR, *arguments],
            env=clean_environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    """(exit status, stdout); a process that does not end in time is ended with SIGTERM and fails."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        process.kill()
        raise
    return process.returncode, output


def polar(*arguments: str, seconds: float = 120, **env: str) -> tuple[int, str]:
    """Run `polar ARGUMENTS` to its end: (exit status, stdout)."""
    done = subprocess.run(
        [*POLAR, *arguments],
        env=clean_environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stdout


def last_json(output: str) -> dict[str, Any]:
    """The JSON object on the last line."""
    value: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return value


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait for a condition of another process; its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.1)
    return value


def service_pid(data_dir: Path, service: str) -> int | None:
    """Pid of a service of `polar up`; none while it does not run."""
    try:
        state = json.loads((data_dir / "up.json").read_text())
    except (OSError, ValueError):
        return None
    pid = state["services"].get(service, {}).get("pid")
    return int(pid) if pid else None


def left_over(data_dir: Path) -> list[int]:
    """Processes of the deployment, or of the demo around it, that still live."""
    return find_marked(str(data_dir)) + find_marked(f"{data_dir}#demo")


def journalled(data_dir: Path) -> int:
    """Answers whose end an agent received so far."""
    path = data_dir / "audit" / "journal.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextlib.contextmanager
def broker_of(data_dir: Path, log: Path) -> Iterator[dict[str, str]]:
    """Only the broker of a deployment that is down; settings with which to reach it."""
    settings = dict(load_deployment(data_dir).settings)
    process = start("broker", log=log, **settings)
    try:
        status = None
        deadline = time.monotonic() + 60
        while status != 0:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            status, _ = polar("topics", "--wait", "5", **settings)
        yield settings
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
