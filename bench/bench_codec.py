"""Cost of the contracts: packed columns against JSON lists, and whole call records.

Columns: 32,768 token ids and log-probs. Call record: 4,096 new prompt ids and 512 sampled tokens,
a turn of a coding agent.
"""

import json
import random
import sys
from collections.abc import Sequence

import zstandard
from pydantic import BaseModel

from bench.record import median_seconds, parser, record
from schemas.base import encode
from schemas.calls import CallRecord, Delivery, MessagesDelta, PromptDelta, ToolsDelta
from schemas.codec import decode
from schemas.columns import FloatColumn, TokenColumn
from schemas.ids import call_id
from schemas.policies import PolicyInterval, PolicyVersion
from schemas.topics import CALLS

NUM_COLUMN_TOKENS = 32_768
NUM_NEW_IDS = 4_096
NUM_SAMPLED = 512
VOCABULARY = 151_669
SESSION = "task/0/0/1"


class Columns(BaseModel):
    """Two packed columns."""

    ids: TokenColumn
    logprobs: FloatColumn


class Lists(BaseModel):
    """The same numbers as JSON lists."""

    ids: list[int]
    logprobs: list[float]


def numbers(count: int) -> tuple[list[int], list[float]]:
    """Ids over the whole vocabulary and log-probs as an engine gives them."""
    source = random.Random(0)
    return [source.randrange(VOCABULARY) for _ in range(count)], [
        -source.expovariate(2.0) for _ in range(count)
    ]


def call_record() -> CallRecord:
    """A call with its text; the text repeats words, as text does."""
    ids, logprobs = numbers(NUM_NEW_IDS + NUM_SAMPLED)
    version = PolicyVersion(lineage="l1", step=3)
    return CallRecord(
        call_id=call_id(SESSION, 2),
        session_id=SESSION,
        group_id="task",
        seq=2,
        request_digest="0" * 64,
        prompt=PromptDelta(base_call=1, kept=9_000, new_ids=TokenColumn(ids[:NUM_NEW_IDS])),
        sampled_ids=TokenColumn(ids[NUM_NEW_IDS:]),
        logprobs=FloatColumn(logprobs[NUM_NEW_IDS:]),
        policy=PolicyInterval(first=version, last=version),
        engine_id="engine-0",
        messages=MessagesDelta(
            base_call=1,
            kept=12,
            new=({"role": "tool", "content": "def f(x):\n    return x + 1\n" * 500},),
            digest="1" * 64,
        ),
        tools=ToolsDelta(digest="2" * 64),
        answer={"role": "assistant", "content": "I shall change the function. " * 60},
        sampling_used={"temperature": 1.0, "top_p": 1.0},
        finish_reason="stop",
        delivery=Delivery.DELIVERED,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and record; `argv` without the program's name."""
    options = parser("codec", __doc__).parse_args(argv)
    ids, logprobs = numbers(NUM_COLUMN_TOKENS)
    packed = Columns(ids=TokenColumn(ids), logprobs=FloatColumn(logprobs))
    lists = Lists(ids=ids, logprobs=logprobs)
    packed_json, lists_json = packed.model_dump_json().encode(), lists.model_dump_json().encode()
    call = call_record()
    written = encode(call)
    compressor = zstandard.ZstdCompressor(level=3)
    record(
        "codec",
        {
            "columns_bytes_per_token": len(packed_json) / NUM_COLUMN_TOKENS,
            "columns_encode_ms": 1e3 * median_seconds(packed.model_dump_json),
            "columns_decode_ms": 1e3 * median_seconds(lambda: Columns.model_validate_json(packed_json)),
            "lists_bytes_per_token": len(lists_json) / NUM_COLUMN_TOKENS,
            "lists_encode_ms": 1e3 * median_seconds(lists.model_dump_json),
            "lists_decode_ms": 1e3 * median_seconds(lambda: Lists.model_validate_json(lists_json)),
            "call_bytes": len(written),
            "call_zstd_bytes": len(compressor.compress(written)),
            "call_encode_ms": 1e3 * median_seconds(lambda: encode(call)),
            "call_decode_ms": 1e3 * median_seconds(lambda: decode(written, CALLS)),
            "json_loads_of_the_same_call_ms": 1e3 * median_seconds(lambda: json.loads(written)),
        },
        only_json=options.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
