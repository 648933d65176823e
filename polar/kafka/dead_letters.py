"""Dead letters: a record that a stage cannot use, kept so that it can be delivered again.

The value stands untouched in polar.dead-letters.v1; headers hold who refused it, why, where it
stood, and its key. Nothing else about the record is needed to write it once more.
"""

from collections.abc import Mapping

from pydantic import ValidationError

from polar.core.stage import Partition
from polar.kafka.records import RawRecord
from schemas.dead_letters import DeadLetter

_KEY_TEXT = "source_key"
_KEY_HEX = "source_key_hex"
"""Used in place of the text where the key is no UTF-8."""


def record_of(letter: DeadLetter, key: bytes | None) -> dict[str, bytes]:
    """Headers of a dead letter."""
    headers = {name: str(value).encode() for name, value in letter.model_dump(mode="json").items()}
    if key is not None:
        try:
            headers[_KEY_TEXT] = key.decode().encode()
        except UnicodeDecodeError:
            headers[_KEY_HEX] = key.hex().encode()
    return headers


def letter_of(record: RawRecord) -> tuple[DeadLetter, bytes | None]:
    """The letter and the original key of a record of polar.dead-letters.v1.

    Raises ValueError when the record is no dead letter of polar.
    """
    try:
        letter = DeadLetter.model_validate(record.headers)
    except ValidationError as error:
        raise ValueError(f"offset {record.offset} of the dead letters has no coordinates") from error
    return letter, _key_of(record.headers)


def source_of(letter: DeadLetter) -> tuple[Partition, int]:
    """Where the refused record stands."""
    return Partition(letter.source_topic, letter.source_partition), letter.source_offset


def _key_of(headers: Mapping[str, str]) -> bytes | None:
    if _KEY_TEXT in headers:
        return headers[_KEY_TEXT].encode()
    if _KEY_HEX in headers:
        return bytes.fromhex(headers[_KEY_HEX])
    return None
