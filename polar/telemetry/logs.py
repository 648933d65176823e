"""The one place where logging is set up.

A record is one line: time, level, service, logger, message, then the fields of `FIELDS` that the
call gave in `extra`. Line breaks inside a message or a traceback are escaped, so that a log can
be read by line-oriented tools.
"""

import logging
import sys
import time

from polar.settings import ProcessSettings

FIELDS = ("session_id", "group_id", "policy_version")
"""Names that a log call may give in `extra`."""

_NOISY = ("aiokafka", "faststream", "httpx", "httpcore", "uvicorn.access", "asyncio")


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING gateway polar.gateway.spool: message session_id=…`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """One line; never raises on odd arguments more than logging itself does."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text = record.getMessage()
        fields = "".join(
            f" {name}={value}" for name in FIELDS if (value := getattr(record, name, None)) is not None
        )
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        head = f"{moment}.{int(record.msecs):03d}Z {record.levelname} {self._service} {record.name}"
        return f"{head}: {text}{fields}".replace("\r", "\\r").replace("\n", "\\n")


def configure(service: str, *, is_command: bool = False) -> None:
    """Log to stderr for this process; the level comes from POLAR_LOG_LEVEL.

    A command for people says what it has to say itself: only warnings of polar are left.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(ProcessSettings().log_level)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL if is_command else logging.WARNING)
    if is_command:
        root.setLevel(logging.WARNING)
