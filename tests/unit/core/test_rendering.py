"""Rendering as engines render: the same text, the same ids, and templates that cannot be continued."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from polar.core.chat_template import ChatTemplate, RenderedTool, TemplateError
from polar.core.prompt_encoding import PromptEncoder
from polar.core.rendering import Renderer, UnsupportedTemplateError, look_back
from polar.core.template_messages import (
    conversation,
    is_text_only,
    template_message,
    template_options,
    template_tool,
)
from tests.chat_models import NONCE, ChatModel

TOOL = {
    "type": "function",
    "function": {
        "strict": True,
        "parameters": {"type": "object", "properties": {"x": {"enum": ["<a>", "ü", 'q"']}}},
        "name": "f",
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":"\\u00fc","n":1e2}'}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Sei knapp & <genau>."},
    {"role": "user", "content": "  Wie viele?\n"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "Erst\nzählen."},
    {"role": "tool", "tool_call_id": "c1", "content": "drei\n"},
    {"role": "assistant", "content": "Drei 🙂", "reasoning": "Fertig."},
    {"role": "user", "content": "Danke."},
]


def no_clock(_: str) -> str:
    raise AssertionError("no clock here")


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_ids_are_those_of_transformers(request: pytest.FixtureRequest, generation_prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("chatml_model", "qwen3_model"):
        model: ChatModel = request.getfixturevalue(name)
        theirs = transformers.AutoTokenizer.from_pretrained(model.folder)
        renderer = model.renderer()
        for options in ({}, {"enable_thinking": False}):
            messages = conversation(TALK, knows_developer=renderer.template.knows_developer)
            tools = [template_tool(TOOL)]
            text = renderer.template.render(
                messages, tools, generation_prompt=generation_prompt, options=options
            )
            expected = theirs.apply_chat_template(
                messages, tools=[dict(tool) for tool in tools], tokenize=True, return_dict=False,
                add_generation_prompt=generation_prompt, **options,
            )  # fmt: skip
            assert renderer.encoder.encode(text) == expected


def test_options_of_a_request_never_replace_what_is_rendered() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ mood }}", {}, no_clock)
    text = template.render(
        [{"role": "user", "content": "u"}], (), generation_prompt=True,
        options={"messages": [{"content": "other"}], "mood": "!"},
    )  # fmt: skip
    assert text == "u!"


def test_a_tool_is_written_as_json_once() -> None:
    template = ChatTemplate("{{ tools[0] | tojson }}|{{ tools[0] | tojson(indent=1) }}", {}, no_clock)
    tool = template_tool(TOOL)
    first = template.render([], [tool], generation_prompt=True, options={})
    assert len(tool.texts) == 2
    assert template.render([], [tool], generation_prompt=True, options={}) == first
    assert json.loads(first.split("|")[0]) == tool
    assert first == template.render([], [dict(tool)], generation_prompt=True, options={})  # type: ignore[list-item]
    assert isinstance(tool, RenderedTool)


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no') }}", "{{ messages[0].content + 1 }}", "{{ messages[9].content.x }}"]
)
def test_a_template_that_refuses_says_so(source: str) -> None:
    template = ChatTemplate(source, {}, no_clock)
    with pytest.raises(TemplateError, match="refuses"):
        template.render([{"role": "user", "content": "u"}], (), generation_prompt=True, options={})


def test_a_template_that_is_none() -> None:
    with pytest.raises(TemplateError, match="cannot be read"):
        ChatTemplate("{% if %}", {}, no_clock)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "no added token"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not close"),
        ("{{ messages[0].content }}", "does not close"),
        ("{{ raise_exception('tools only') }}", "tools only"),
    ],
)
def test_templates_that_cannot_be_continued(chatml_model: ChatModel, source: str, why: str) -> None:
    template = ChatTemplate(source, {}, no_clock)
    encoder = PromptEncoder(chatml_model.tokenizer, template=source, mark="zqmarkzq")
    with pytest.raises(UnsupportedTemplateError, match=why):
        Renderer(template, encoder, nonce=NONCE)


def test_a_closing_token_that_swallows_spaces_is_refused(chatml_model: ChatModel) -> None:
    raw = json.loads(chatml_model.tokenizer.to_str())
    for token in raw["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
    encoder = PromptEncoder(
        Tokenizer.from_str(json.dumps(raw)), template=chatml_model.template, mark="zqmarkzq"
    )
    template = ChatTemplate(chatml_model.template, {}, no_clock)
    with pytest.raises(UnsupportedTemplateError, match="swallows"):
        Renderer(template, encoder, nonce=NONCE)


def test_messages_reach_the_template_as_engines_give_them() -> None:
    message = template_message(TALK[2])
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": "ü", "n": 100.0}
    assert message["reasoning"] == message["reasoning_content"] == "Erst\nzählen."
    broken = {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{"}}]}
    assert template_message(broken)["tool_calls"][0]["function"]["arguments"] == {}
    assert template_message(broken)["content"] == ""
    billing = {"role": "system", "content": "x-anthropic-billing-header: 1\nBe brief."}
    assert template_message(billing)["content"] == "Be brief."


def test_developer_messages_become_one_system_message_at_the_front() -> None:
    talk = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": "b"},
    ]
    assert conversation(talk, knows_developer=False) == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "u"},
    ]
    assert conversation(talk, knows_developer=True)[2]["role"] == "developer"


def test_tools_have_the_engines_fields() -> None:
    assert list(template_tool(TOOL)["function"]) == ["name", "description", "parameters", "strict"]
    assert template_tool({"type": "function", "function": {"name": "g", "extra": 1}}) == {
        "type": "function",
        "function": {"name": "g", "description": None, "parameters": None},
    }


def test_template_options() -> None:
    assert template_options({"reasoning_effort": "none"}) == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    asked = {"chat_template_kwargs": {"enable_thinking": True, "x": 1}, "reasoning_effort": "low"}
    assert template_options(asked) == {"enable_thinking": True, "x": 1, "reasoning_effort": "low"}
    for only_the_engine in ({"continue_final_message": True}, {"documents": [{}]}):
        assert template_options(only_the_engine) is None
    assert template_options({"add_generation_prompt": False}) is None


def test_pictures_are_the_engines_business() -> None:
    assert is_text_only(TALK)
    assert not is_text_only([{"role": "user", "content": [{"type": "image_url"}]}])


def test_looking_back_is_short_however_long_the_history() -> None:
    tools = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "t" * 10_000}]
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, *tools * 200]
    history[4] = {**history[4], "reasoning": "r"}
    short = look_back(history, thought=False)
    assert [message["role"] for message in short] == [
        "system", "user", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip
    assert sum(len(message["content"]) for message in short) < 1000


def test_templates_that_show_call_ids_are_known(chatml_model: ChatModel) -> None:
    assert not chatml_model.renderer().shows_call_ids
    source = chatml_model.template.replace("call.function.name | tojson", "call.id | tojson")
    template = ChatTemplate(source, {}, no_clock)
    encoder = PromptEncoder(chatml_model.tokenizer, template=source, mark="zqmarkzq")
    assert Renderer(template, encoder, nonce=NONCE).shows_call_ids


def test_ids_that_no_tokenizer_writes_are_told_by_the_end_of_an_answer(chat_model: ChatModel) -> None:
    renderer = chat_model.renderer()
    encode = renderer.encoder.encode
    ids = encode("The quick brown fox jumps over the lazy dog; def f(x):\n    return x\n" * 20)
    assert renderer.is_canonical(ids)
    assert renderer.is_canonical([*ids, renderer.close_id])
    assert not renderer.is_canonical([*ids, *encode("qu"), *encode("ick brown")])
    assert renderer.is_canonical([])
    assert renderer.is_canonical(encode("x" * 3000))
