"""Ids and log-probs cut out of an engine's bytes say the same as the bytes read as plain JSON."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.core import token_text
from polar.core.dialects import engine_answer
from polar.core.dialects.answer_json import Logprobs, clean, load_answer
from polar.core.dialects.engine_answer import AnswerError
from polar.core.session_history import EncodedMessages, EncodedTools, SessionHistory
from polar.core.token_text import TokenText, sound
from schemas.columns import TokenTextColumn

ids = st.lists(st.integers(0, 200_000), max_size=30)
texts = st.text(max_size=12) | st.sampled_from(
    ['"prompt_token_ids":[', '"logprobs":{"content":[{', '}]},"', '\\"prompt_token_ids\\":[1]']
)


def load_call(data: bytes) -> Any:
    """As answers of any size are read, which only long ones are else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_answer, "_SHORT", 0)
        return engine_answer.load_call(data)


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def entries(text: str, values: list[float | None]) -> dict[str, Any]:
    return {
        "content": [
            {"token": text, "logprob": value, "bytes": [1, 2], "top_logprobs": []} for value in values
        ]
    }


def same(value: Any, plain: Any) -> bool:
    """Whether what was cut says the same as what json makes of it."""
    if isinstance(value, TokenText):
        return value == plain
    if isinstance(value, Logprobs):
        wanted = [clean(entry.get("logprob")) for entry in plain["content"]]
        return [str(number) for number in value] == [str(number) for number in wanted]
    if isinstance(value, dict) and isinstance(plain, dict):
        return list(value) == list(plain) and all(same(value[name], plain[name]) for name in value)
    if isinstance(value, list) and isinstance(plain, list):
        return len(value) == len(plain) and all(map(same, value, plain))
    return bool(value == plain)


@given(
    ids,
    st.lists(
        st.tuples(texts, st.lists(st.none() | st.floats(-20_000, 0) | st.integers(-3, 0), max_size=4)),
        max_size=3,
    ),
    texts,
    st.booleans(),
)
def test_nothing_is_lost_by_cutting(
    prompt: list[int], choices: list[tuple[str, list[float | None]]], text: str, spaced: bool
) -> None:
    answer = {
        "id": text,
        "choices": [
            {
                "index": index,
                "message": {"content": word, "unknown": [text]},
                "logprobs": entries(word, values) if values else None,
                "finish_reason": "stop",
                "token_ids": [1, 2],
            }
            for index, (word, values) in enumerate(choices)
        ],
        "prompt_token_ids": prompt,
        "kv_transfer_params": None,
    }
    data = json.dumps(answer).encode() if spaced else compact(answer)
    assert same(load_call(data), json.loads(data))


@pytest.mark.parametrize(
    "answer",
    [
        {"kv_transfer_params": {"prompt_token_ids": [1, 2]}, "choices": []},
        {"choices": [{"message": {"logprobs": entries("a", [-1.0]), "x": 1}}]},
        {"prompt_token_ids": ["a"], "choices": []},
        {"prompt_token_ids": [1.5], "choices": []},
        {"prompt_token_ids": [[1], 2], "choices": []},
    ],
)
def test_what_stands_elsewhere_is_read_as_plain_json(answer: dict[str, Any]) -> None:
    assert load_call(compact(answer)) == answer


def test_a_cut_answer_is_an_error_and_numbers_beyond_json_are_null() -> None:
    data = compact({"prompt_token_ids": [1, 2, 3], "choices": []})
    for size in range(len(data)):
        with pytest.raises(AnswerError):
            load_call(data[:size])
    assert load_call(b'{"a":NaN,"b":1e999,"c":-1.5}') == {"a": None, "b": None, "c": -1.5}


def test_large_answers_of_vllm_are_cut() -> None:
    data = compact(
        {
            "choices": [{"index": 0, "logprobs": entries("token_id:1", [-0.5, -9999.0]), "token_ids": [1]}],
            "prompt_token_ids": [7, 8],
        }
    )
    body = load_answer(data)
    assert isinstance(body["prompt_token_ids"], TokenText)
    assert isinstance(body["choices"][0]["logprobs"], Logprobs)
    assert math.isnan(body["choices"][0]["logprobs"][1])


@given(ids, ids, ids, st.booleans())
def test_a_prompt_that_goes_on_is_read_from_where_it_is_new(
    prompt: list[int], sampled: list[int], new: list[int], continues: bool
) -> None:
    history = SessionHistory()
    history.remember(1, TokenText.of(prompt + sampled), EncodedMessages.of(()), EncodedTools.of(()))
    following = (prompt + sampled if continues else prompt) + new
    delta = history.prompt(TokenText(TokenText.of(following).text))
    assert delta is not None
    assert (prompt + sampled)[: delta.kept] + delta.new.tolist() == following
    assert len(delta.new) == len(following) - delta.kept


@given(ids, ids)
def test_texts_are_joined_like_lists(first: list[int], then: list[int]) -> None:
    joined = TokenText.of(first).followed_by(TokenText.of(then))
    assert joined == first + then
    assert len(joined) == len(first + then)
    assert TokenText(joined.text) == joined
    assert joined[len(first) :] == then


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 12), max_size=9))
def test_ids_are_sound(numbers: list[int]) -> None:
    text = TokenText(TokenText.of(numbers).text)
    assert text.is_sound()
    assert len(text) == len(numbers)
    assert TokenTextColumn.from_text(text.text.decode()).tolist() == numbers
    assert TokenTextColumn(numbers).to_text().encode() == text.text


@given(
    st.text("0019,-. ]", max_size=12)
    | st.sampled_from(["2147483648", "-9" * 9, "1,99999999999999999999", "true", "-0", "1,,2"])
)
def test_what_is_sound_is_what_a_record_can_hold(text: str) -> None:
    if TokenText(text.encode()).is_sound():
        items = TokenTextColumn.from_text(text).tolist()
        assert len(items) == len(text.split(",")) if text else not items
    else:
        with pytest.raises(ValueError, match="something else"):
            TokenTextColumn.from_text(text)


@given(st.binary(min_size=1, max_size=9) | st.text("0189,-./:+", min_size=1).map(str.encode))
def test_long_texts_are_scanned_as_short_ones(text: bytes) -> None:
    assert token_text._scan_long(text) == token_text._scan_short(text)
    long = TokenText(text + b",123" * token_text._LONG)
    assert (len(long), long.is_sound()) == (long.text.count(b",") + 1, TokenText(text).is_sound())


def test_what_is_no_id_reads_as_minus_one() -> None:
    text = "1,,2147483648,-,007,-5,99999999999999999999"
    assert TokenTextColumn.from_text(text).tolist() == [1, -1, -1, -1, 7, -5, -1]


def test_other_things_than_ids_make_no_text() -> None:
    for items in (["1"], [1.5], [True], [None], [[1]], [2**31], [2**70], [object()]):
        assert sound(items) is None
    assert len(TokenText(b"")) == 0
