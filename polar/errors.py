"""Errors by the boundary they crossed.

    PolarError
    ├── LogError              the broker
    │   ├── LogUnavailableError     no acknowledgement within the time-out
    │   └── RecordTooLargeError     over the topic's max_message_bytes
    ├── EngineError           an inference engine
    ├── GatewayError          a gateway's admin surface
    ├── RuntimeFailedError    a runtime could not be made or died
    ├── TrainerError          batch, checkpoint or backend
    └── SettingsError         what a user configured

Each message names the thing and the remedy. A handler turns them into data (dead letter,
session reason, HTTP body); nothing else catches them broadly.
"""


class PolarError(Exception):
    """Base of all errors that polar raises for others to see."""


class LogError(PolarError):
    """The log refused or did not answer."""


class LogUnavailableError(LogError):
    """No broker acknowledged within the time-out; the record may or may not be on the log."""


class RecordTooLargeError(LogError):
    """A record is over the limit of its topic and was not sent."""


class EngineError(PolarError):
    """An inference engine is down, wrong or gave an incomplete answer."""


class GatewayError(PolarError):
    """A gateway's admin endpoint refused or did not answer."""


class RuntimeFailedError(PolarError):
    """A runtime could not be prepared or was lost."""


class TrainerError(PolarError):
    """A batch, checkpoint or backend is not usable."""


class SettingsError(PolarError):
    """A setting is missing or contradicts another; the message says what to type."""
