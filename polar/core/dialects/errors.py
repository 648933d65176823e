"""Errors on their way to a harness, before a dialect gives them its shape."""

import re
from dataclasses import dataclass

CONTEXT_OVERFLOW = "context_length_exceeded"

_LIMIT = re.compile(r"(?:context|model) length (?:of|is)\D{0,20}(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class ApiError:
    """An answer with an error status; the message is for the person who reads the harness's log."""

    status: int
    message: str
    kind: str
    """OpenAI's `type`."""
    code: str | None = None
    """A word for programs; `context_length_exceeded` makes harnesses compact their history."""
    param: str | None = None
    retry_after: int | None = None
    """Seconds."""

    @property
    def is_context_overflow(self) -> bool:
        """Whether the prompt does not fit the model."""
        return self.code == CONTEXT_OVERFLOW

    @property
    def overflow(self) -> tuple[int, int] | None:
        """(tokens asked for, tokens that fit), as far as the engine's words tell both."""
        match = _LIMIT.search(self.message)
        if match is None:
            return None
        limit = int(match[1])
        asked = max((n for n in map(int, _NUMBER.findall(self.message)) if n > limit), default=None)
        return None if asked is None else (asked, limit)
