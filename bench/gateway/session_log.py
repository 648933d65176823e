"""A session of 60 calls on the log: bytes of its records, of their ids, and the CPU that the ids cost."""

import asyncio
import json
import time
from typing import Any

import cramjam
import zstandard
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from bench.gateway.deployment import Broker, Gateway
from bench.gateway.load import Client, request
from bench.gateway.workload import SessionLoad, ids
from polar.core.dialects.engine_answer import load_call
from polar.core.session_history import EncodedMessages, EncodedTools, SessionHistory
from polar.core.token_text import TokenText, sound
from polar.kafka.reader import read_all_raw
from schemas.base import canonical_json
from schemas.calls import CallRecord
from schemas.codec import decode
from schemas.columns import TokenTextColumn
from schemas.topics import CALLS

_ZSTD = 4
"""Kafka's number of the codec."""
_LEVEL = 1
"""As polar.kafka.compat sets it."""


def session_on_the_log(broker: Broker, gateway: Gateway, load: SessionLoad) -> dict[str, Any]:
    """Drive one session call by call, then read it back. One call at a time: a record is a batch."""
    (key,) = gateway.keys(1)
    asyncio.run(_drive(gateway, key, load))
    records: list[tuple[CallRecord, bytes]] = []
    for raw in asyncio.run(read_all_raw(broker.settings, CALLS)):
        event = decode(raw.value, CALLS)
        if isinstance(event, CallRecord) and event.session_id == gateway.last_session:
            records.append((event, raw.value or b""))
    if len(records) != load.calls:
        raise RuntimeError(f"{len(records)} records of {load.calls} calls are on the log")
    last = records[-1][0]
    return {
        "log_mb": sum(_batch_bytes(data) for _, data in records) / 1e6,
        "ids_mb": sum(_ids_bytes(record) for record, _ in records) / 1e6,
        "last_prompt_tokens": last.prompt.kept + len(last.prompt.new_ids),
    }


def record_cpu_us(load: SessionLoad) -> float:
    """CPU a call for its ids: read from the engine's bytes, compared with those that it was sent,
    delta-encoded, compressed, remembered. The first prompt is the engine's own, as in the gateway."""
    history = SessionHistory()
    compressor = zstandard.ZstdCompressor(level=_LEVEL)  # kept, as polar.kafka.compat does
    tools, messages = EncodedTools.of(()), EncodedMessages.of(())
    everything = ids(0, load.last_prompt + load.sampled)
    answers, sent = [], []
    for call in range(load.calls):
        size = load.prompt(call)
        choice = {"token_ids": everything[size : size + load.sampled]}
        answer = {"choices": [choice], "prompt_token_ids": everything[:size]}
        answers.append(json.dumps(answer, separators=(",", ":")).encode())
        sent.append(TokenText.of(everything[:size]) if call else None)
    begun = time.thread_time()
    for seq, (data, asked) in enumerate(zip(answers, sent, strict=True), start=1):
        body = load_call(data)
        told, sampled = body["prompt_token_ids"], sound(body["choices"][0]["token_ids"])
        if asked is not None and asked != told:
            raise RuntimeError("the engine answers another prompt")
        prompt = asked or (told if isinstance(told, TokenText) else sound(told))
        delta = None if prompt is None else history.prompt(prompt)
        if prompt is None or delta is None or sampled is None or len(prompt) != load.prompt(seq - 1):
            raise RuntimeError("these are no ids")
        compressor.compress(delta.new.text + sampled.text)
        history.remember(seq, prompt.followed_by(sampled), messages, tools)
    return 1e6 * (time.thread_time() - begun) / load.calls


async def _drive(gateway: Gateway, key: str, load: SessionLoad) -> None:
    client = Client(gateway.port)
    messages = load.first_messages()
    for call in range(load.calls):
        answer = json.loads(await client.ask(request(gateway.port, load.body(messages), key=key)))
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        if call + 1 < load.calls:
            messages.append(load.next_message(call))
    client.close()


def _batch_bytes(value: bytes) -> int:
    """What a record costs on the log, framing included, as a batch of its own."""
    builder = DefaultRecordBatchBuilder(
        2, _ZSTD, is_transactional=0, producer_id=1, producer_epoch=0, base_sequence=0, batch_size=1 << 26
    )
    builder.append(0, 0, key=b"bench-gateway-0/0/0/1", value=value, headers=[])
    return len(builder.build())


def _ids_bytes(record: CallRecord) -> int:
    return len(cramjam.zstd.compress(_ids_text(record.prompt.new_ids, record.sampled_ids), level=_LEVEL))


def _ids_text(prompt: TokenTextColumn, sampled: TokenTextColumn) -> bytes:
    """The part of a record's JSON that is ids."""
    columns = {"new_ids": prompt, "sampled_ids": sampled}
    return canonical_json({name: column.to_text() for name, column in columns.items()})
