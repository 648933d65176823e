"""A stream of the engine on its way through a dialect, without a gateway."""

import json
from typing import Any

from polar.core.dialects.base import Dialect, ModelRequest
from polar.core.dialects.engine_stream import EngineStream
from polar.core.dialects.sse import SseDecoder


def wire(events: list[Any]) -> bytes:
    """The engine's bytes."""
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return b"".join(f"data: {line}\n\n".encode() for line in lines)


def convert(dialect: Dialect, request: ModelRequest, *reads: bytes) -> tuple[bytes, EngineStream]:
    """The client's bytes of a whole stream that comes in these reads, and what was captured."""
    stream = EngineStream(request, request.choices)
    client = dialect.stream(request, stream.captured)
    decoder = SseDecoder()
    out = b""
    for data in reads:
        for event in decoder.feed(data):
            chunk = stream.on_data(event.data)
            out += b"" if chunk is None else client.on_chunk(chunk)
    assert stream.is_whole
    stream.close()
    return out + client.ending(), stream
