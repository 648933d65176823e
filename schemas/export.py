"""Machine-readable contracts: JSON Schema of every value, AsyncAPI 3 of the topology.

`python -m schemas.export` writes schemas/generated/, `--check` only says whether it is stale.
The output is a pure function of the models and the two tables, so a change of a contract is
always seen as a change of these files.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from schemas.base import WireModel
from schemas.dead_letters import DeadLetter
from schemas.services import SERVICES
from schemas.topics import DEAD_LETTERS, TOPIC_OF, TOPICS, TopicSpec

GENERATED = Path(__file__).with_name("generated")
JSON_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
VALUES: tuple[type[WireModel], ...] = (*TOPIC_OF, DeadLetter)
"""Every model that gets a schema of its own; the dead letter's are its headers."""
VERSION = "1"
"""Major version of the topology: every topic name ends in it."""


def value_schema(model: type[WireModel]) -> dict[str, Any]:
    """JSON Schema of one value. `type` is required: a reader picks the model by it."""
    schema = model.model_json_schema()
    return {"$schema": JSON_SCHEMA_DIALECT, **_type_required(schema)}


def asyncapi() -> dict[str, Any]:
    """The AsyncAPI 3 document: a channel a topic, an operation a (service, topic, direction)."""
    _, definitions = models_json_schema(
        [(model, "validation") for model in VALUES], ref_template="#/components/schemas/{model}"
    )
    schemas = {name: _type_required(schema) for name, schema in definitions["$defs"].items()}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "polar",
            "version": VERSION,
            "description": "Values are JSON (schemas.base.encode); keys are UTF-8 text. A deployment may put "
            "another word in place of the leading `polar.` of every topic name.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {topic.suffix: _channel(topic) for topic in TOPICS},
        "operations": _operations(),
        "components": {"messages": _messages(), "schemas": schemas},
    }


def topics_table() -> str:
    """The topics as a Markdown table, for ARCHITECTURE.md."""
    lines = [
        "| topic | key | partitions | values | written by | read by | kept |",
        "|---|---|---|---|---|---|---|",
    ]
    partitions = {"sessions": "many", "groups": "G", "one": "1"}
    kept = {"time": "by time", "compacted": "compacted", "forever": "for ever"}
    for topic in TOPICS:
        keys = ", ".join(dict.fromkeys(topic.models.values())) or "the record's own"
        values = ", ".join(model.__name__ for model in topic.models) or "raw bytes; DeadLetter as headers"
        readers = ", ".join(name for name, spec in SERVICES.items() if topic in spec.reads) or "people"
        number = partitions[topic.partitions]
        cells = (topic.name, keys, number, values, topic.written_by, readers, kept[topic.kept])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def documents() -> dict[str, bytes]:
    """Every generated file: name → content."""
    values: dict[str, Mapping[str, Any]] = {
        f"{model.__name__}.schema.json": value_schema(model) for model in VALUES
    }
    values["asyncapi.json"] = asyncapi()
    contents = {name: _pretty(value) for name, value in values.items()}
    contents["topics.md"] = topics_table().encode()
    return contents


def stale(folder: Path = GENERATED) -> list[str]:
    """Names that are missing, differ or should not be there, with the reason."""
    expected = documents()
    found = {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}
    reasons = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            reasons.append(f"{name}: missing")
        elif name not in expected:
            reasons.append(f"{name}: nothing generates it")
        elif found[name] != expected[name]:
            reasons.append(f"{name}: differs from the models")
    return reasons


def write(folder: Path = GENERATED) -> int:
    """Write the folder anew; returns the number of files."""
    expected = documents()
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in expected:
            path.unlink()
    for name, content in expected.items():
        (folder / name).write_bytes(content)
    return len(expected)


def _type_required(schema: dict[str, Any]) -> dict[str, Any]:
    if "const" not in schema.get("properties", {}).get("type", {}):
        return schema
    others = [name for name in schema.get("required", []) if name != "type"]
    return {**schema, "required": ["type", *others]}


def _channel(topic: TopicSpec) -> dict[str, Any]:
    keys = {model.__name__: field for model, field in topic.models.items()}
    names = list(keys) or [DeadLetter.__name__]
    channel: dict[str, Any] = {
        "address": topic.name,
        "description": f"Written by {topic.written_by}; kept: {topic.kept}.",
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
        "bindings": {
            "kafka": {
                "topic": topic.name,
                "partitions": topic.num_partitions(),
                "topicConfiguration": _topic_configuration(topic),
                "bindingVersion": "0.5.0",
            }
        },
        "x-partitioned-by": topic.partitions,
    }
    if keys:
        channel["x-key-fields"] = keys
    return channel


def _topic_configuration(topic: TopicSpec) -> dict[str, Any]:
    """The configs that the Kafka binding names; numbers as numbers, policies as a list."""
    configs = topic.configs()
    named: dict[str, Any] = {
        "cleanup.policy": [configs["cleanup.policy"]],
        "max.message.bytes": int(configs["max.message.bytes"]),
    }
    if "retention.ms" in configs:
        named["retention.ms"] = int(configs["retention.ms"])
    return named


def _operations() -> dict[str, Any]:
    operations: dict[str, Any] = {}
    for service, spec in SERVICES.items():
        for topic in TOPICS:
            written = [model for model in topic.models if model in spec.writes]
            if topic is DEAD_LETTERS and spec.dead_letters:
                operations[_operation_id(service, "writes", topic)] = _operation(
                    "send", service, topic, [DeadLetter.__name__]
                )
            if written:
                operations[_operation_id(service, "writes", topic)] = _operation(
                    "send", service, topic, [model.__name__ for model in written]
                )
            if topic in spec.reads:
                operations[_operation_id(service, "reads", topic)] = _operation(
                    "receive", service, topic, [model.__name__ for model in topic.models]
                )
    return operations


def _operation_id(service: str, verb: str, topic: TopicSpec) -> str:
    return f"{service}.{verb}.{topic.suffix.removesuffix('.v1')}"


def _operation(action: str, service: str, topic: TopicSpec, messages: list[str]) -> dict[str, Any]:
    channel = f"#/channels/{topic.suffix}"
    return {
        "action": action,
        "channel": {"$ref": channel},
        "summary": SERVICES[service].does,
        "messages": [{"$ref": f"{channel}/messages/{name}"} for name in messages],
    }


def _messages() -> dict[str, Any]:
    messages: dict[str, Any] = {}
    for model, topic in TOPIC_OF.items():
        key = topic.models[model]
        messages[model.__name__] = {
            "name": model.__name__,
            "summary": _first_line(model),
            "payload": {"$ref": f"#/components/schemas/{model.__name__}"},
            "bindings": {
                "kafka": {
                    "key": {"type": "string", "description": f"UTF-8 text, equal to `{key}`"},
                    "bindingVersion": "0.5.0",
                }
            },
        }
    messages[DeadLetter.__name__] = {
        "name": DeadLetter.__name__,
        "summary": "The refused record's value as it was; key: the refused record's key.",
        "contentType": "application/octet-stream",
        "headers": {"$ref": f"#/components/schemas/{DeadLetter.__name__}"},
        "payload": {"type": "string", "format": "binary"},
    }
    return messages


def _first_line(model: type[WireModel]) -> str:
    return (model.__doc__ or model.__name__).strip().split("\n\n")[0].replace("\n    ", " ")


def _pretty(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: written, or up to date with --check; 1: stale."""
    parser = argparse.ArgumentParser(prog="python -m schemas.export", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when something is stale")
    if not parser.parse_args(arguments).check:
        sys.stdout.write(f"{write()} files written to {GENERATED.name}/\n")
        return 0
    reasons = stale()
    for reason in reasons:
        sys.stderr.write(f"stale: {reason}; run `make schemas`\n")
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
