"""The given Kafka faults, in the project's terms: each names what the log must do.

Not run here, because the fault lies elsewhere in this design: 003 (no long step happens inside a
group), 007, 008, 010 (records over the limit are refused by name, there is no claim check yet),
023 (a session ends behind its last call on one partition), 024 to 026 (the trainer's checkpoint).
"""

import asyncio
import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError, MessageSizeTooLargeError

from polar.core.open_keys import OpenKeys
from polar.core.stage import Emit, LogRecord, Output, Partition
from polar.errors import RecordTooLargeError
from polar.kafka import driver
from polar.kafka import writer as writer_module
from polar.kafka.driver import Stage
from polar.kafka.writer import LogWriter
from polar.settings import LogSettings
from schemas.base import encode
from schemas.calls import CallRecord
from schemas.sessions import SessionStarted
from schemas.topics import CALLS
from tests.integration.log_samples import every_event
from tests.unit.core.given_cases import Case, cases
from tests.unit.kafka.consumer_records import PREFIX, Fetched, KeptWrites, PositionsOnly

SETTINGS = LogSettings(bootstrap_servers="broker:1", topic_prefix=PREFIX, session_partitions=1)
REASONS = {
    "empty": "not_json", "decompress": "not_json", "decode": "not_json", "not_a_map": "not_json",
    "schema_version": "schema_version", "missing_field": "invalid",
}  # fmt: skip
"""Words of the cases → reasons of dead letters."""
ELSEWHERE = ("003", "007", "008", "010", "023", "024", "025", "026")
TP = TopicPartition(CALLS.named(PREFIX), 0)
P = Partition(CALLS.suffix, 0)
(SAMPLE,) = [json.loads(encode(event)) for event in every_event() if isinstance(event, CallRecord)]


def ids(*numbers: str) -> tuple[str, ...]:
    return tuple(f"kafka-{number}" for number in numbers)


def only(number: str) -> list[Any]:
    """The parameter of one case (or the skipped one)."""
    return [parameter for parameter in cases("kafka") if parameter.id in {*ids(number), "no-cases"}]


def value_of(record: Case) -> bytes | None:
    """Bytes of a case's record; its calls become CallRecords."""
    if "value_hex" in record:
        return bytes.fromhex(record["value_hex"])
    value = record["value"]
    if value is None or not isinstance(value, dict):
        return None if value is None else json.dumps(value).encode()
    session, call = f"{value['session_id']}/0/0/0", value.get("call_id", "")
    number = call.rpartition("/")[2]
    seq = int(number) if number.isdigit() else 1
    version = value["schema_version"]
    ours = SAMPLE | {
        "session_id": session, "seq": seq, "call_id": f"{session}#{seq}", "schema_version": version
    }  # fmt: skip
    if not call:
        del ours["call_id"]
    return json.dumps(ours).encode()


class UniqueCalls:
    """Starts a session a call; what is not done holds the commit like an open key."""

    def __init__(self) -> None:
        self.keys = OpenKeys(100)
        self.not_done: set[int] = set()

    def on_assigned(self, ends: Mapping[Partition, tuple[int, int]]) -> None:
        self.keys.assigned(ends)

    def on_revoked(self, partitions: Iterable[Partition]) -> None:
        self.keys.revoked(partitions)

    def on_record(self, record: LogRecord, now: float) -> list[Output]:
        self.keys.seen(record)
        call = record.event
        assert isinstance(call, CallRecord)
        if record.offset in self.not_done:
            self.keys.hold(call.call_id, record.partition, record.offset)
            return []
        return [Emit(SessionStarted(session_id=call.call_id, group_id="g", node_id="n"))]

    def on_caught_up(self, partition: Partition, now: float) -> list[Output]:
        return []

    def on_tick(self, now: float) -> list[Output]:
        return []

    def commit_offsets(self) -> Mapping[Partition, int]:
        return self.keys.commit_offsets()

    def metrics(self) -> Mapping[str, float]:
        return {}


class Member:
    """One member of the group; all members share the broker's commits and the output."""

    def __init__(self, committed: dict[TopicPartition, int], writes: KeptWrites, *, may_commit: bool) -> None:
        self.core, self.consumer = UniqueCalls(), PositionsOnly(committed)
        self.stage = Stage(SETTINGS, self.core, [CALLS], name="case")
        self.stage._publisher._writer = writes  # type: ignore[assignment]

        async def commit(offsets: Mapping[TopicPartition, Any]) -> None:
            if not may_commit:
                raise CommitFailedError
            committed.update({partition: item.offset for partition, item in offsets.items()})

        self.consumer.commit = commit  # type: ignore[method-assign]


async def run(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> tuple[KeptWrites, dict[TopicPartition, int], Case]:
    """Play a script; what was written, what is committed, and what was noted on the way."""
    records = {
        record["offset"]: Fetched(TP.topic, 0, record["offset"], value_of(record), record["key"].encode())
        for record in case["given"]["records"]
    }
    low = case["given"].get("low_watermark", {}).get("calls/0", min(records))
    end = max(records) + 1
    stored = case["given"].get("stored_offset", {}).get("calls/0")
    committed = {} if stored is None else {TP: stored}

    async def offset_ranges(settings: LogSettings, partitions: Any) -> dict[Partition, tuple[int, int]]:
        return dict.fromkeys(partitions, (low, end))

    monkeypatch.setattr(driver, "offset_ranges", offset_ranges)
    script, writes, noted = case["given"]["script"], KeptWrites(), {}
    operations = [step["op"] for step in script]
    commits_before_revoke = "revoke" not in operations or "commit" in operations[: operations.index("revoke")]
    members: dict[str, Member] = {}
    for step in script:
        operation = step["op"]
        if operation in {"upgrade", "replay_dlq"}:
            break
        member = members.get(step["member"])
        if member is None:
            # A revocation without a commit before it: the broker refuses the last one.
            may_commit = commits_before_revoke or bool(members)
            member = members[step["member"]] = Member(committed, writes, may_commit=may_commit)
        if operation in {"assign", "start"}:
            await member.stage.assigned(member.consumer, [TP])
            noted["start"] = member.consumer.positions[TP]
            noted["lost_history"] = member.stage.counts["lost_history"]
        if operation == "fetch":
            (done,) = [other["offsets"] for other in script if other["op"] == "done"]
            member.core.not_done = set(step["offsets"]) - set(done)
        if operation in {"process", "fetch"}:
            await member.stage.process(member.consumer.fetch([records[o] for o in step["offsets"]]))
        if operation == "commit":
            await member.stage.leave()
        if operation == "revoke":
            await member.stage.revoked([TP])
            noted["committed_at_revoke"] = committed.get(TP)
        if operation == "start":
            await member.stage.process(
                member.consumer.fetch([r for o, r in records.items() if o >= noted["start"]])
            )
    assert all(member.stage.failure is None for member in members.values())
    return writes, committed, noted


@pytest.mark.parametrize("case", cases("kafka", given="records", without=ids(*ELSEWHERE, "018")))
async def test_scripts_of_assignments_poison_and_commits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, committed, noted = await run(case, monkeypatch)
    expect = case["expect"]
    started = [event.session_id for event in writes.events]
    if "unique_calls" in expect:
        assert len(set(started)) == expect["unique_calls"]
    if "duplicates_dropped" in expect:
        assert len(started) - len(set(started)) == expect["duplicates_dropped"]
    if "committed" in expect:
        assert committed[TP] == expect["committed"]["calls/0"]
    if "committed_at_revoke" in expect:
        assert noted["committed_at_revoke"] == expect["committed_at_revoke"]["calls/0"]
    found = [
        (letter.source_topic, letter.source_partition, letter.source_offset, letter.reason)
        for letter, *_ in writes.letters
    ]
    assert found == [
        (CALLS.suffix, d["partition"], d["offset"], REASONS[d["reason"]]) for d in expect.get("dlq", [])
    ]
    for outcome in expect.get("one_of", []):
        if outcome["action"] == "rebuild":
            assert noted["start"] == outcome["start_offset"]
            assert len(set(started)) == outcome.get("unique_calls", len(set(started)))
            assert noted["lost_history"] == int("session_marks" in outcome)


@pytest.mark.parametrize("case", only("018"))
async def test_a_newer_record_is_delivered_again_by_a_newer_reader(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, committed, _ = await run(case, monkeypatch)
    assert committed[TP] == case["expect"]["committed"]["calls/0"]
    ((_, key, value),) = writes.letters
    monkeypatch.setattr(CallRecord, "SCHEMA_MAJOR", 2)
    upgraded = Member(committed, writes, may_commit=True)
    await upgraded.stage.assigned(upgraded.consumer, [TP])
    end = committed[TP]
    await upgraded.stage.process(upgraded.consumer.fetch([Fetched(TP.topic, 0, end, value, key)]))
    assert len(writes.letters) == 1
    started = [event.session_id for event in writes.events]
    assert len(started) == len(set(started)) == case["expect"]["unique_calls"]


@pytest.mark.parametrize("case", cases("kafka", given="record", without=ids("009")))
async def test_sizes_are_decided_before_the_send(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    config, record = case["given"]["config"], case["given"]["record"]
    topic = dataclasses.replace(CALLS, max_message_bytes=config["max_record_bytes"])
    sent = await write(topic, b"x" * record["encoded_value_bytes"], monkeypatch)
    if "inline" in case["expect"]["transport"]:
        assert sent == [record["encoded_value_bytes"]]
    else:
        assert sent == [], "refused by name, not dropped"


@pytest.mark.parametrize("case", only("009"))
async def test_a_send_that_fails_is_observed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    size = case["given"]["record"]["encoded_value_bytes"]
    assert await write(CALLS, b"x" * size, monkeypatch, refuse=True) == []


async def write(
    topic: Any, value: bytes, monkeypatch: pytest.MonkeyPatch, *, refuse: bool = False
) -> list[int]:
    """Sizes that reached the broker; a refusal must be a RecordTooLargeError."""
    sent: list[int] = []

    class Producer:
        async def start(self) -> None: ...

        async def send(self, name: str, value: bytes, key: bytes | None, headers: Any) -> Any:
            future = asyncio.get_running_loop().create_future()
            if refuse:
                future.set_exception(MessageSizeTooLargeError())
            else:
                sent.append(len(value))
                future.set_result(None)
            return future

    async def close(producer: Producer) -> None: ...

    monkeypatch.setattr(writer_module, "new_producer", lambda settings, *, idempotent: Producer())
    monkeypatch.setattr(writer_module, "close_producer", close)
    monkeypatch.setattr(LogWriter, "_position", lambda self, metadata: (P, 0))
    async with LogWriter(SETTINGS) as writer:
        if refuse or len(value) > topic.max_message_bytes:
            with pytest.raises(RecordTooLargeError):
                await writer.write_raw(topic, None, value)
        else:
            await writer.write_raw(topic, None, value)
    return sent
