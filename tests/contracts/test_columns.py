"""Laws of packed columns."""

import base64
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.base import WireModel, encode
from schemas.columns import FloatColumn, TokenColumn

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32)
FINITE32 = st.floats(width=32, allow_nan=False)
INDEX = st.one_of(st.none(), st.integers(-40, 40))


class Holder(WireModel):
    tokens: TokenColumn
    logprobs: FloatColumn


@given(st.lists(INT32), st.lists(FLOAT32))
def test_round_trip_through_json(tokens: list[int], logprobs: list[float]) -> None:
    before = Holder(tokens=TokenColumn(tokens), logprobs=FloatColumn(logprobs))
    after = Holder.model_validate_json(encode(before))
    assert after == before
    assert after.tokens.tolist() == tokens
    assert struct.pack(f"<{len(logprobs)}f", *after.logprobs) == struct.pack(f"<{len(logprobs)}f", *logprobs)
    assert encode(after) == encode(before)


@given(st.lists(st.integers(0, 2**24 - 1), min_size=1), st.integers(-(2**31), 2**31 - 1))
def test_ids_of_three_bytes_are_written_short(tokens: list[int], other: int) -> None:
    text = TokenColumn(tokens).to_text()
    assert text.startswith("3:")
    assert len(text) == 2 + 4 * len(tokens)
    packed = base64.b64decode(text[2:])
    assert [int.from_bytes(packed[i : i + 3], "big") for i in range(0, len(packed), 3)] == tokens
    mixed = TokenColumn([*tokens, other])
    assert TokenColumn.from_text(mixed.to_text()) == mixed
    assert mixed.to_text().startswith("3:") == (0 <= other < 2**24)


@pytest.mark.parametrize("text", ["3:AAA", "3:AA==", "3:!", "4:AAAA"])
def test_broken_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        TokenColumn.from_text(text)
    with pytest.raises(ValueError):
        FloatColumn.from_text("3:AAAA")


@given(st.lists(INT32))
def test_bytes_are_little_endian_int32(tokens: list[int]) -> None:
    assert TokenColumn(tokens).data == struct.pack(f"<{len(tokens)}i", *tokens)


@given(st.lists(FINITE32))
def test_bytes_are_little_endian_float32(values: list[float]) -> None:
    assert FloatColumn(values).data == struct.pack(f"<{len(values)}f", *values)


def test_float32_is_the_precision_and_nan_survives() -> None:
    column = FloatColumn([0.1, math.nan, -math.inf])
    assert column[0] == struct.unpack("<f", struct.pack("<f", 0.1))[0]
    assert math.isnan(column[1])
    assert column[2] == -math.inf


@given(st.lists(INT32, max_size=20), INDEX, INDEX, st.one_of(st.none(), st.integers(-3, 3).filter(bool)))
def test_slices_are_those_of_a_list(
    tokens: list[int], start: int | None, stop: int | None, step: int | None
) -> None:
    column = TokenColumn(tokens)
    part = column[start:stop:step]
    assert isinstance(part, TokenColumn)
    assert part.tolist() == tokens[start:stop:step]
    assert part.data == TokenColumn(tokens[start:stop:step]).data


@given(st.lists(INT32, max_size=20), st.integers(-30, 30))
def test_indexing_is_that_of_a_list(tokens: list[int], index: int) -> None:
    column = TokenColumn(tokens)
    if -len(tokens) <= index < len(tokens):
        assert column[index] == tokens[index]
    else:
        with pytest.raises(IndexError):
            column[index]


@given(st.lists(INT32, max_size=20), st.lists(INT32, max_size=20))
def test_sequence_behaviour(left: list[int], right: list[int]) -> None:
    a, b = TokenColumn(left), TokenColumn(right)
    assert (a + b).tolist() == left + right
    assert (a == b) == (left == right)
    assert len(a) == len(left)
    assert list(a) == left
    assert list(reversed(a)) == left[::-1]
    if left == right:
        assert hash(a) == hash(b)


def test_a_token_column_is_no_float_column() -> None:
    assert TokenColumn([0]) != FloatColumn([0.0])
    assert TokenColumn([0]).data == FloatColumn([0.0]).data


@given(st.binary().filter(lambda data: len(data) % 4))
def test_a_length_that_holds_no_whole_items_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="whole 4-byte items"):
        TokenColumn.from_bytes(data)
    with pytest.raises(ValidationError, match="whole 4-byte items"):
        Holder.model_validate({"tokens": base64.b64encode(data).decode(), "logprobs": ""})


@given(st.binary().filter(lambda data: len(data) % 4 == 0))
def test_any_whole_bytes_are_a_column(data: bytes) -> None:
    assert TokenColumn.from_bytes(data).data == data
    assert len(TokenColumn.from_bytes(data)) == len(data) // 4


@given(st.text())
def test_text_is_a_column_or_a_validation_error(text: str) -> None:
    try:
        holder = Holder.model_validate({"tokens": text, "logprobs": ""})
    except ValidationError:
        return
    assert base64.b64decode(text) == holder.tokens.data


@pytest.mark.parametrize(
    "value", [None, 7, {}, b"AAAA", "AAAAA", "AA AA", "é", [1.5], [2**31], ["1"], [None]], ids=repr
)
def test_other_forms_are_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        Holder.model_validate({"tokens": value, "logprobs": ""})


def test_lists_are_accepted_from_programs_without_packing() -> None:
    holder = Holder.model_validate({"tokens": [1, 2], "logprobs": [-0.5, -1]})
    assert holder.tokens == TokenColumn([1, 2])
    assert holder.logprobs == FloatColumn([-0.5, -1.0])
