"""What OpenAI's two protocols share: errors, model lists, counts of tokens, keep-alive."""

from typing import Any

import orjson

from polar.core.dialects.errors import ApiError


class OpenAiShapes:
    """The part of a dialect that both protocols have."""

    keep_alive = b": keep-alive\n\n"

    def error(self, error: ApiError) -> bytes:
        """See Dialect."""
        return orjson.dumps(error_object(error))

    def counted(self, tokens: int) -> bytes:
        """See Dialect. Chat has no such question; the answer is that of Responses."""
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

    def models(self, name: str, created: int) -> bytes:
        """See Dialect."""
        return orjson.dumps({"object": "list", "data": [_model(name, created)]})

    def model(self, name: str, created: int) -> bytes:
        """See Dialect."""
        return orjson.dumps(_model(name, created))


def error_object(error: ApiError) -> dict[str, Any]:
    """An error in OpenAI's shape; harnesses compact their history on these words."""
    message = error.message
    if error.is_context_overflow and "maximum context length is" not in message.lower():
        message = f"This model's maximum context length is exceeded: {message}"
    return {"error": {"message": message, "type": error.kind, "param": error.param, "code": error.code}}


def _model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "polar"}
