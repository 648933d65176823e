"""A log record is one line, with the fields by which a session can be followed."""

import logging
import sys

from polar.telemetry.logs import LineFormatter


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("polar.gateway", logging.WARNING, __file__, 1, message, args, None)
    made.__dict__.update(extra)
    return made


def fail(message: str) -> None:
    raise ValueError(message)


def test_fields_follow_the_message() -> None:
    line = LineFormatter("gateway").format(record("call %d done", 3, session_id="t/0/0/1", group_id="t"))
    assert line.endswith("WARNING gateway polar.gateway: call 3 done session_id=t/0/0/1 group_id=t")


def test_line_breaks_and_tracebacks_stay_on_one_line() -> None:
    made = record("first\nsecond\rthird")
    try:
        fail("a\nb")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = LineFormatter("node").format(made)
    assert "\n" not in line
    assert "\r" not in line
    assert "first\\nsecond\\rthird" in line
    assert "ValueError: a\\nb" in line
