"""A rendered history extends prompt + answer, with no words that nobody wrote."""

import json
from typing import Any

import jinja2
import pytest

from polar.engines.models import chat_template

TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "price of 4 x lamp?"}


def render(messages: list[dict[str, Any]], *, tools: list[Any] | None = None, prompt: bool = False) -> str:
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.ChainableUndefined
    )
    environment.filters["tojson"] = json.dumps
    return environment.from_string(chat_template()).render(
        messages=messages, tools=tools, add_generation_prompt=prompt
    )


def test_no_system_prompt_is_injected() -> None:
    assert render([USER], prompt=True) == (
        "<|im_start|>user\nprice of 4 x lamp?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Tools: GET."}]])
def test_history_extends_prompt_and_answer(system: list[dict[str, str]]) -> None:
    messages = [*system, USER]
    first = render(messages, prompt=True)
    answer = {"role": "assistant", "content": "  GET lamp "}
    second = render([*messages, answer, {"role": "user", "content": "lamp = 12"}], prompt=True)
    assert second.startswith(first + "  GET lamp <|im_end|>\n")


def test_tool_calls_are_written_as_hermes_reads_them() -> None:
    call = {"type": "function", "function": {"name": "get", "arguments": '{"item": "lamp"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    results = [{"role": "tool", "content": "12"}, {"role": "tool", "content": "13"}]
    first = render([USER], tools=[TOOL], prompt=True)
    assert json.dumps(TOOL) in first
    second = render([USER, answer, *results], tools=[TOOL], prompt=True)
    sampled = '<tool_call>\n{"name": "get", "arguments": {"item": "lamp"}}\n</tool_call>'
    assert second == (
        f"{first}{sampled}<|im_end|>\n<|im_start|>user\n<tool_response>\n12\n</tool_response>"
        "\n<tool_response>\n13\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_arguments_that_vllm_parsed_are_written_as_json() -> None:
    call = {"type": "function", "function": {"name": "get", "arguments": {"item": "lamp"}}}
    text = render([USER, {"role": "assistant", "content": "Look:", "tool_calls": [call, call]}])
    assert text.count('\n<tool_call>\n{"name": "get", "arguments": {"item": "lamp"}}\n</tool_call>') == 2
