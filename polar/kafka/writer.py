"""Events in: one idempotent producer whose every send is acknowledged or reported.

Invariants:
- A record is sent once. A write that runs out of time (or is cancelled) may still reach the log,
  because an idempotent producer never gives a batch up; writing an equal record again waits for
  that first send, or returns its position, instead of sending a second copy.
- Records of one writer reach each partition in the order of the calls.
- Unacknowledged bytes are bounded; at the bound writes wait, under their own time-out.

The broker need not be up: a writer connects in the background and as often as it has to.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    KafkaError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    ProducerClosed,
    ProducerFenced,
    UnknownError,
    UnknownTopicOrPartitionError,
)

from polar.core.stage import Emit, Partition
from polar.errors import LogUnavailableError, RecordTooLargeError
from polar.kafka.clients import (
    MAX_UNACKNOWLEDGED_BYTES,
    RETRY_SECONDS,
    bootstrap_servers,
    close_producer,
    new_producer,
)
from polar.kafka.dead_letters import record_of
from polar.kafka.verification import verify_retries
from polar.settings import LogSettings
from schemas.base import Event, encode
from schemas.dead_letters import DeadLetter
from schemas.topics import DEAD_LETTERS, TOPIC_OF, TopicSpec

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 20_000
"""Interrupted sends whose fate is kept for a second attempt; about 200 bytes each."""

Headers = tuple[tuple[str, bytes], ...]
Record = tuple[TopicSpec, bytes | None, bytes | None, Headers]
"""Topic, key, value, headers."""


def record_size(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]) -> int:
    """Bytes that count against a topic's limit: uncompressed value + key + headers."""
    return len(key or b"") + len(value or b"") + sum(len(k.encode()) + len(v) for k, v in headers)


def _check_size(topic: TopicSpec, key: bytes | None, value: bytes | None, headers: Headers) -> int:
    size = record_size(key, value, headers)
    if size > topic.max_message_bytes:
        raise RecordTooLargeError(
            f"record {(key or b'').decode(errors='replace')!r} for {topic.suffix} has {size} bytes, "
            f"the topic takes {topic.max_message_bytes}; nothing was sent"
        )
    return size


class LogWriter:
    """Async context manager around one idempotent producer."""

    def __init__(self, settings: LogSettings) -> None:
        self._settings = settings
        self._producer: AIOKafkaProducer | None = None
        self._connected = asyncio.Event()
        self._connecting: asyncio.Task[None] | None = None
        self._order = asyncio.Lock()
        self._unacknowledged = 0
        self._room = asyncio.Event()
        self._remembered: OrderedDict[bytes, asyncio.Future[Any]] = OrderedDict()
        self.records_sent = 0
        """Records handed to the producer since the start."""
        self.sends_rejoined = 0
        """Writes that found their record already under way and did not send it again."""

    async def __aenter__(self) -> Self:
        """Begin to connect. Raises SettingsError when no broker is configured."""
        bootstrap_servers(self._settings)
        self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await close_producer(producer)

    @property
    def is_connected(self) -> bool:
        """Whether a broker has answered and the producer is usable."""
        return self._connected.is_set()

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes that were handed over and not acknowledged yet."""
        return self._unacknowledged

    async def write(self, event: Event, *, headers: Mapping[str, str] = {}) -> tuple[Partition, int]:
        """Write one event; its partition and offset once the broker has acknowledged it.

        Raises RecordTooLargeError (nothing was sent) and LogUnavailableError (no acknowledgement
        within `send_timeout_seconds`; write the equal event again to wait on).
        """
        topic = TOPIC_OF[type(event)]
        return await self.write_raw(
            topic, topic.key_of(event).encode(), encode(event), {k: v.encode() for k, v in headers.items()}
        )

    async def write_many(self, events: Sequence[Emit]) -> list[tuple[Partition, int]]:
        """Write events in order, many in flight; positions once all are acknowledged.

        Raises like `write`. After LogUnavailableError the same call may be repeated: what was
        acknowledged or is under way is not sent again. Sizes are checked before the first send.
        """
        records: list[Record] = []
        for emit in events:
            topic = TOPIC_OF[type(emit.event)]
            headers = tuple((k, v.encode()) for k, v in emit.headers.items())
            records.append((topic, topic.key_of(emit.event).encode(), encode(emit.event), headers))
        return await self._write_all(records)

    async def write_many_raw(
        self, topic: TopicSpec, records: Sequence[tuple[bytes | None, bytes | None, Mapping[str, bytes]]]
    ) -> list[tuple[Partition, int]]:
        """Write (key, value, headers) as they are; else like `write_many`."""
        return await self._write_all(
            [(topic, key, value, tuple(headers.items())) for key, value, headers in records]
        )

    async def _write_all(self, records: Sequence[Record]) -> list[tuple[Partition, int]]:
        for record in records:
            _check_size(*record)
        sends: list[asyncio.Future[Any]] = []
        try:
            await self._begin(records, sends)
            await self._settle(sends)
            return [self._position(future.result()) for future in sends]
        except BaseException:
            for record, future in zip(records, sends, strict=False):
                self._remember(_identity(*record), future)
            raise

    async def write_raw(
        self, topic: TopicSpec, key: bytes | None, value: bytes | None, headers: Mapping[str, bytes] = {}
    ) -> tuple[Partition, int]:
        """Write bytes as they are; else like `write`."""
        (position,) = await self.write_many_raw(topic, [(key, value, headers)])
        return position

    async def write_dead_letter(self, letter: DeadLetter, key: bytes | None, value: bytes | None) -> None:
        """List a record among the dead letters, raw and with its coordinates.

        A value over that topic's limit is left out and the letter says so; it still stands at
        its coordinates. Raises LogUnavailableError.
        """
        headers = record_of(letter, key)
        try:
            await self.write_raw(DEAD_LETTERS, letter.source_topic.encode(), value, headers)
        except RecordTooLargeError as error:
            shortened = letter.model_copy(update={"detail": f"{letter.detail} (value left out: {error})"})
            await self.write_raw(DEAD_LETTERS, letter.source_topic.encode(), None, record_of(shortened, key))

    # -- sending ------------------------------------------------------------------------

    async def _begin(self, records: Sequence[Record], sends: list[asyncio.Future[Any]]) -> None:
        """Hand records to the producer, in order; adds a future for each to `sends`."""
        found = [self._earlier(*record) for record in records]
        known = [earlier for earlier in found if earlier is not None]
        if len(known) == len(records):
            sends += known
            return
        seconds = self._settings.send_timeout_seconds
        loop = asyncio.get_running_loop()
        topic, size = records[0][0], 0
        try:
            async with asyncio.timeout(seconds) as limit, self._order:
                await self._connected.wait()
                for (topic, key, value, headers), earlier in zip(records, found, strict=True):
                    if earlier is not None:
                        sends.append(earlier)
                        continue
                    size = record_size(key, value, headers)
                    limit.reschedule(loop.time() + seconds)
                    await self._make_room(size)
                    sends.append(await self._send(topic, key, value, headers, size))
        except UnknownTopicOrPartitionError as error:
            raise LogUnavailableError(
                f"topic {topic.named(self._settings.topic_prefix)} does not exist; `polar up` makes it, "
                "or polar.kafka.topics.ensure_topics"
            ) from error
        except (TimeoutError, KafkaError) as error:
            if isinstance(error, MessageSizeTooLargeError):
                raise RecordTooLargeError(f"record for {topic.suffix} ({size} bytes): {error}") from error
            self._reconnect_after(error)
            raise self._unavailable(topic.suffix, error) from error

    def _earlier(
        self, topic: TopicSpec, key: bytes | None, value: bytes | None, headers: Headers
    ) -> asyncio.Future[Any] | None:
        """The send of an equal record that was interrupted and has not failed."""
        if not self._remembered:
            return None
        earlier = self._remembered.get(_identity(topic, key, value, headers))
        if earlier is None or _failed(earlier):
            return None
        self.sends_rejoined += 1
        return earlier

    async def _send(
        self, topic: TopicSpec, key: bytes | None, value: bytes | None, headers: Headers, size: int
    ) -> asyncio.Future[Any]:
        if self._producer is None:
            raise LogUnavailableError(f"{topic.suffix}: the writer is closed")
        name = topic.named(self._settings.topic_prefix)
        future: asyncio.Future[Any] = await self._producer.send(name, value, key, headers=list(headers))
        self.records_sent += 1
        self._unacknowledged += size
        future.add_done_callback(lambda done: self._acknowledged(done, size))
        return future

    async def _make_room(self, size: int) -> None:
        """Only the holder of the order lock waits here."""
        while self._unacknowledged and self._unacknowledged + size > MAX_UNACKNOWLEDGED_BYTES:
            self._room.clear()
            await self._room.wait()

    def _acknowledged(self, future: asyncio.Future[Any], size: int) -> None:
        self._unacknowledged -= size
        self._room.set()
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._reconnect_after(error)

    async def _settle(self, sends: Sequence[asyncio.Future[Any]]) -> None:
        """Wait for the acknowledgements without ever cancelling a send."""
        pending = {future for future in sends if not future.done()}
        if pending:
            await asyncio.wait(pending, timeout=self._settings.send_timeout_seconds)
        for future in sends:
            if not future.done():
                raise self._unavailable("send", TimeoutError("not acknowledged"))
            error = future.exception()
            if isinstance(error, MessageSizeTooLargeError):
                raise RecordTooLargeError(f"the broker refused the record: {error}") from error
            if error is not None:
                raise self._unavailable("send", error) from error

    def _position(self, metadata: Any) -> tuple[Partition, int]:
        topic = metadata.topic.removeprefix(f"{self._settings.topic_prefix}.")
        return Partition(topic, metadata.partition), metadata.offset

    def _remember(self, identity: bytes, future: asyncio.Future[Any]) -> None:
        if _failed(future):
            self._remembered.pop(identity, None)
            return
        self._remembered[identity] = future
        while len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    def _unavailable(self, what: str, error: BaseException) -> LogUnavailableError:
        return LogUnavailableError(
            f"{what}: no acknowledgement from {self._settings.bootstrap_servers} within "
            f"{self._settings.send_timeout_seconds:g} s ({error!r}); the record may or may not be on the log"
        )

    # -- connection ---------------------------------------------------------------------

    def _connect(self) -> None:
        self._connecting = asyncio.create_task(self._connect_until_up(), name="log-writer-connect")

    def _reconnect_after(self, error: BaseException) -> None:
        """A producer whose sequence is broken refuses everything from then on: replace it."""
        broken = (OutOfOrderSequenceNumber, ProducerFenced, ProducerClosed)
        is_dead = isinstance(error, broken) or type(error) is KafkaError
        if is_dead and self._producer is not None and self._connected.is_set():
            logger.warning("the producer is broken (%r), starting another", error)
            self._connected.clear()
            self._connect()

    async def _connect_until_up(self) -> None:
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await close_producer(producer)
        has_warned = False
        is_idempotent = True
        while True:
            producer = new_producer(self._settings, idempotent=is_idempotent)
            if not is_idempotent:
                verify_retries(producer, self._settings)
            try:
                await producer.start()
            except UnknownError:
                # The embedded broker refuses to hand out producer ids in this way.
                is_idempotent = False
                await close_producer(producer)
                continue
            except (KafkaError, OSError) as error:
                if not has_warned:
                    logger.warning("no broker at %s (%s), trying on", self._settings.bootstrap_servers, error)
                    has_warned = True
                await close_producer(producer)
            except BaseException:
                await close_producer(producer)
                raise
            else:
                self._producer = producer
                self._connected.set()
                return
            await asyncio.sleep(RETRY_SECONDS)


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _identity(topic: TopicSpec, key: bytes | None, value: bytes | None, headers: Headers) -> bytes:
    state = hashlib.sha256()
    for part in (topic.suffix.encode(), key, value, *(item for k, v in headers for item in (k.encode(), v))):
        state.update(b"-" if part is None else len(part).to_bytes(8, "little") + part)
    return state.digest()
