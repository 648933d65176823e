"""Where recorded events come from: an archive folder, or the topics of a deployment."""

from pathlib import Path
from typing import TYPE_CHECKING

from polar.cli.exits import MissingError

if TYPE_CHECKING:
    from polar.core.stage import LogRecord
    from polar.settings import LogSettings
    from schemas.topics import TopicSpec


def log_settings(
    data_dir: Path | None, bootstrap_servers: str | None = None, prefix: str | None = None
) -> "LogSettings":
    """How to reach the log: options first, then the deployment of `data_dir`, then the environment.

    Raises MissingError when no broker is named anywhere.
    """
    from polar.settings import LogSettings
    from polar.supervision.kept import load_deployment, log_settings_of

    settings = LogSettings()
    folder = data_dir or settings.data_dir
    if data_dir is not None or (not settings.bootstrap_servers and load_deployment(folder).settings):
        settings = log_settings_of(folder.absolute())
    changes: dict[str, object] = {}
    if bootstrap_servers is not None:
        changes["bootstrap_servers"] = bootstrap_servers
    if prefix is not None:
        changes["topic_prefix"] = prefix
    settings = settings.model_copy(update=changes)
    if not settings.bootstrap_servers:
        raise MissingError(
            "no broker is named: give --data-dir of a running `polar up`, or --bootstrap-servers host:port"
        )
    return settings


async def read_topics(settings: "LogSettings", *topics: "TopicSpec") -> "list[LogRecord]":
    """Every readable record of these topics, topic by topic."""
    from polar.kafka.reader import read_all

    return [record for topic in topics for record in await read_all(settings, topic)]
