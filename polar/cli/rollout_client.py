"""Talks to the rollout API for `polar submit` and `polar status`."""

from pathlib import Path
from typing import Any

from polar.cli.exits import MissingError
from polar.errors import PolarError


class ApiError(PolarError):
    """The rollout API refused a request."""


def api_url(given: str | None, data_dir: Path | None) -> str:
    """URL of the rollout API: the option, else the deployment of the data directory, else the settings."""
    if given is not None:
        return given.rstrip("/")
    from polar.settings import LogSettings, SchedulerSettings
    from polar.supervision.ports import load_ports

    ports = load_ports((data_dir or LogSettings().data_dir).absolute())
    settings = SchedulerSettings()
    host = "127.0.0.1" if settings.host == "0.0.0.0" else settings.host  # noqa: S104  (compared, not bound)
    return f"http://{host}:{ports.get('scheduler', settings.port)}"


def call_api(url: str, method: str, path: str, body: Any = None) -> Any:
    """The JSON answer.

    Raises ApiError with the API's own words when it refuses, MissingError when it is not there.
    """
    import httpx

    try:
        answer = httpx.request(method, f"{url}{path}", json=body, timeout=30, trust_env=False)
    except httpx.HTTPError as error:
        raise MissingError(f"no rollout API at {url} ({error}); is `polar up` running?") from error
    if not answer.is_success:
        raise ApiError(f"{method} {path}: {answer.status_code} {answer.text[:2000]}")
    return answer.json()
