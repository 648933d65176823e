"""One dispatched call on its way through the engine and back.

Invariant: whatever happens after dispatch, the call is recorded once, and the end of its
answer (a whole body, or the last events of a stream) is sent only after that.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polar.core.continuity import Plan
from polar.core.dialects.base import ClientStream, Dialect
from polar.core.dialects.engine_answer import (
    MALFORMED,
    AnswerError,
    Captured,
    malformed,
    read_answer,
)
from polar.core.dialects.engine_stream import EngineStream
from polar.core.dialects.sse import SseDecoder, SseError, SseEvent
from polar.core.recording import Dispatched
from polar.gateway.answers import Answer
from polar.gateway.engine import EngineBrokenError, EngineDownError
from polar.gateway.engines import EnginePool, EngineSlot
from polar.gateway.recorder import Recorder
from polar.gateway.responses import HttpError, refused_by_engine, unavailable
from polar.gateway.sessions import LiveSession
from polar.gateway.upstream import BrokenOffError, Response
from schemas.calls import Delivery
from schemas.ids import call_id

logger = logging.getLogger(__name__)


class PromptIgnoredError(AnswerError):
    """The engine did not use the prompt ids that it was sent."""


_DRAIN_SECONDS = 1.0
"""An engine may take so long to close its stream behind `[DONE]`; then the connection is closed."""


class Exchange:
    """See the module. Made at dispatch; `run` is called once."""

    def __init__(
        self,
        engines: EnginePool,
        recorder: Recorder,
        live: LiveSession,
        slot: EngineSlot,
        call: Dispatched,
        planned: Plan,
        dialect: Dialect,
        answer: Answer,
    ) -> None:
        self._engines = engines
        self._recorder = recorder
        self._live = live
        self._slot = slot
        self._call = call
        self._planned = planned
        self._dialect = dialect
        self._answer = answer
        self._call_name = answer.request_id = call_id(call.session_id, call.first_seq)
        self._mark = slot.versions.open()
        self._stream: EngineStream | None = None
        self._client: ClientStream | None = None
        self._has_begun = False
        self._record_id: int | None = None

    async def run(self, body: Mapping[str, Any]) -> None:
        """Talk to the engine and answer the harness; whatever happens, record."""
        try:
            try:
                await self._talk(body)
            except asyncio.CancelledError as cancelled:
                self._record(Delivery.CLIENT_ABORTED, str(cancelled) or "cancelled")
                raise
        except OSError as error:
            # The number stays reserved: its record is written at the seal or the next start.
            logger.exception(
                "session_id=%s call %s is not durable", self._call.session_id, self._call.first_seq
            )
            self._end_with(unavailable(f"the call cannot be recorded: {error}", "spool_error"))
        finally:
            self._slot.versions.close(self._mark)

    async def _talk(self, body: Mapping[str, Any]) -> None:
        headers = {
            "X-Polar-Purpose": "call",
            "X-Polar-Call": self._call_name,
        }
        try:
            async with self._slot.client.chat(body, headers) as response:
                await self._take(response, streamed=bool(body["stream"]))
        except EngineDownError as error:
            self._slot.suspect("engine_down", str(error))
            await self._fail(unavailable(f"engine_down: {error}", "engine_down"))
        except EngineBrokenError as error:
            # In words, and by the request id in the head, that make harnesses ask again. What they
            # would do after a dropped connection they do not do after just any error in a stream.
            await self._fail(_bad_gateway(f"upstream connection error: {error}", "engine_unavailable"))
        except PromptIgnoredError as error:
            self._slot.suspect("engine_ignores_ids", str(error))
            await self._fail(_bad_gateway(str(error), "engine_ignores_ids"))
        except (AnswerError, SseError) as error:
            await self._fail(_bad_gateway(str(error), "engine_answer"))

    async def _take(self, response: Response, *, streamed: bool) -> None:
        if response.status != 200:
            data = await response.read()
            if response.status == 404:
                self._slot.suspect("engine_serves_other_model", "the engine refused the policy's model name")
            await self._fail(refused_by_engine(response.status, data, response.headers.get("retry-after")))
        elif streamed:
            await self._pass_on(response)
        else:
            captured, answer = read_answer(await response.read(), self._call.request)
            self._prove_prompt(captured)
            await self._deliver(captured, answer)

    async def _pass_on(self, response: Response) -> None:
        """Events flow as they come, to a harness that wants them; the end waits for the record."""
        request = self._call.request
        self._stream = stream = EngineStream(request, request.choices)
        if request.stream:
            self._client = self._dialect.stream(request, stream.captured)
        decoder = SseDecoder()
        while data := await response.readany():
            await self._write(self._converted(decoder.feed(data)))
            if stream.done or stream.error is not None:
                break
        await self._write(self._converted(decoder.finish()))
        if stream.error is not None:
            raise EngineBrokenError(f"engine {self._slot.engine_id} reports: {stream.error}")
        if not stream.is_whole:
            raise EngineBrokenError(f"engine {self._slot.engine_id} ended its stream too early")
        if self._client is None:
            await self._deliver(stream.captured, stream.whole_answer())
        else:
            await self._end(stream.close(), self._client.ending)
        await _drain(response)

    async def _write(self, data: bytes | None) -> None:
        """The head of the stream goes out with the engine's first chunk, though it may say nothing."""
        if data or (data is not None and not self._has_begun):
            self._has_begun = True
            await self._answer.write(data)

    def _converted(self, events: Sequence[SseEvent]) -> bytes | None:
        """Bytes for the harness from the engine's chunks; None without any. Raises AnswerError."""
        if self._stream is None:
            return None
        chunks = [chunk for event in events if (chunk := self._stream.on_data(event.data)) is not None]
        if chunks:
            self._prove_prompt(self._stream.captured)
        if self._client is None or not chunks:
            return None
        try:
            return b"".join([self._client.on_chunk(chunk) for chunk in chunks])
        except MALFORMED as error:
            raise malformed(error) from error

    def _prove_prompt(self, captured: Captured) -> None:
        """Nothing is passed on of an answer to another prompt than the one that was sent as ids."""
        if self._call.prompt is None or captured.prompt_ids is self._call.prompt:
            return
        if self._call.prompt != captured.prompt_ids:
            self._recorder.counters["prompt_ignored"] += 1
            raise PromptIgnoredError(
                f"engine {self._slot.engine_id} answers another prompt than the ids that it was sent"
            )
        captured.prompt_ids = self._call.prompt  # equal, and its size is known

    async def _deliver(self, captured: Captured, answer: dict[str, Any]) -> None:
        """Answer a harness that wants the whole at once."""
        try:
            body = self._dialect.answer(self._call.request, answer, captured)
        except MALFORMED as error:
            raise malformed(error) from error
        await self._end(captured, lambda: body)

    async def _end(self, captured: Captured, ending: Callable[[], bytes]) -> None:
        """A whole answer is here: record it; its end is sent once the record is durable."""
        await self._engines.refresh(self._slot)
        try:
            end = ending()
        except MALFORMED as error:
            raise malformed(error) from error
        record_id = self._record(Delivery.DELIVERED, "", captured)
        self._slot.note_capture(is_complete=captured.is_complete())
        self._answer.hold(end)
        await self._recorder.durable(record_id)
        self._answer.release()

    async def _fail(self, error: HttpError) -> None:
        """Record the failure, then tell the harness."""
        await self._recorder.durable(self._record(Delivery.UPSTREAM_ERROR, error.api.message))
        self._end_with(error)

    def _end_with(self, error: HttpError) -> None:
        stream = self._client or self._dialect.stream(self._call.request, Captured())
        self._answer.fail(error, stream.failure(error.api))

    def _record(self, delivery: Delivery, error: str, captured: Captured | None = None) -> int:
        """Spool the record, once: what comes later finds the call recorded."""
        if self._record_id is None:
            if captured is None:
                captured = self._stream.close() if self._stream else Captured()
            self._record_id = self._recorder.record(
                self._live, self._call, self._planned, captured,
                last_version=self._slot.versions.close(self._mark), delivery=delivery, error=error,
            )  # fmt: skip
        return self._record_id


def _bad_gateway(message: str, code: str) -> HttpError:
    return HttpError(502, message, kind="upstream_error", code=code, retry_after=1)


async def _drain(response: Response) -> None:
    """Read a stream to its end, so that its connection can serve the next call."""
    with contextlib.suppress(TimeoutError, BrokenOffError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            await response.read()
