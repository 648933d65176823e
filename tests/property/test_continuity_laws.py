"""Laws of continuity, for every template: what was sampled stays, what is new reads as in full.

Conversations are random, and so are the cuts between sampled tokens.
"""

import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.core.continuity import Asked
from polar.core.continuity_table import ContinuityTable
from polar.core.rendering import AnswerShape, Renderer
from polar.core.template_messages import conversation
from polar.core.token_text import TokenText
from tests.chat_models import ChatModel
from tests.harness_loop import Loop, Message, Turn, engine_ids, rendered

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_response>", "<think>",
    "</think>", "<|eot_id|>", "<|start_header_id|>", "<|begin_of_text|>",
)  # fmt: skip
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command — häufig benutzt.",
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
    },
)

plain_text = st.text(
    st.sampled_from(string.ascii_letters + string.digits + " \n.,{}[]\"'\\/-_äß漢🙂\t"), max_size=40
)
solid_text = plain_text.filter(lambda text: text.strip() == text and text != "")
untrusted = st.lists(plain_text | st.sampled_from(SPECIAL), max_size=5).map("".join)
arguments = st.dictionaries(
    st.sampled_from(["cmd", "path", "n"]), plain_text | st.integers(-9, 9) | st.booleans(), max_size=3
)


@st.composite
def answers(draw: st.DrawFn, *, thinks: bool, one_call: bool) -> Message:
    """An answer as its model gives it."""
    calls = draw(st.lists(arguments, max_size=1 if one_call else 2))
    content = "" if calls and (one_call or draw(st.booleans())) else draw(solid_text)
    answer: Message = {"role": "assistant", "content": content}
    if calls:
        answer["tool_calls"] = [
            {
                "id": f"call_{draw(st.integers(0, 10**6))}",
                "type": "function",
                "function": {"name": "bash", "arguments": json.dumps(value, ensure_ascii=False)},
            }
            for value in calls
        ]
    if thinks and draw(st.booleans()):
        thought = draw(solid_text)
        if draw(st.booleans()):
            answer["reasoning"] = thought
        else:
            answer["content"] = f"<think>\n{thought}\n</think>\n\n{answer['content']}"
    return answer


def replies(answer: Message, text: st.SearchStrategy[str]) -> st.SearchStrategy[list[Message]]:
    """What a harness adds behind an answer."""
    results = [
        text.map(lambda content, call=call: {"role": "tool", "tool_call_id": call["id"], "content": content})
        for call in answer.get("tool_calls", ())
    ]
    user = text.map(lambda content: {"role": "user", "content": content})
    tail = st.lists(user, min_size=0 if results else 1, max_size=1)
    return st.tuples(st.tuples(*results), tail).map(lambda parts: [*parts[0], *parts[1]])


def respelled(answer: Message) -> Message:
    """The answer as a harness sends it back: compact arguments, no reasoning, spaces around it."""
    echo = {name: value for name, value in answer.items() if name != "reasoning"}
    echo["content"] = f" {answer['content']}\n"
    for_call = [
        {**call, "function": {**call["function"], "arguments": json.dumps(
            json.loads(call["function"]["arguments"]), separators=(",", ":"))}}
        for call in answer.get("tool_calls", ())
    ]  # fmt: skip
    return {**echo, "tool_calls": for_call} if for_call else echo


class Conversation:
    """A conversation that hypothesis drives: what the model meant, and what the harness sends."""

    def __init__(
        self, data: st.DataObject, model: ChatModel, loop: Loop, text: st.SearchStrategy[str]
    ) -> None:
        self.data = data
        self.model = model
        self.loop = loop
        self.text = text
        first = [{"role": "user", "content": data.draw(text)}]
        if data.draw(st.booleans()):
            first.insert(0, {"role": "system", "content": data.draw(plain_text)})
        self.meant: list[Message] = list(first)
        self.sent: list[Message] = list(first)
        self.tools: tuple[Message, ...] = data.draw(st.sampled_from([(), TOOLS]))
        self.fields: dict[str, Any] = data.draw(
            st.sampled_from([{}, {"chat_template_kwargs": {"enable_thinking": False}}])
        )

    def turn(self) -> Turn:
        """One call; then the harness adds its reply."""
        thinks = self.model.thinks and not self.fields
        answer = self.data.draw(answers(thinks=thinks, one_call=self.model.one_call))
        turn = self.loop.call(list(self.sent), answer, tools=self.tools, fields=self.fields)
        echo = respelled(answer) if self.data.draw(st.booleans()) else answer
        new = self.data.draw(replies(answer, self.text))
        self.meant += [answer, *new]
        self.sent += [echo, *new]
        return turn

    def asked(self, messages: list[Message]) -> Asked:
        return Asked.of(messages, self.tools, self.fields)


def full_text(renderer: Renderer, asked: Asked) -> str:
    """The conversation as the template writes it, as a whole."""
    return rendered(renderer, asked.messages, asked, generation_prompt=True)


@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("policy", ["template", "preserve"])
def test_sampled_ids_stay_and_the_rest_is_the_tail_of_a_full_tokenisation(
    chat_model: ChatModel, policy: Any, data: st.DataObject
) -> None:
    renderer = chat_model.renderer()
    talk = Conversation(data, chat_model, Loop(renderer, policy), plain_text)
    before: Turn | None = None
    for _ in range(4):
        turn = talk.turn()
        if before is None:
            assert turn.planned.relation == "first"
        elif turn.planned.relation == "thinking_stripped":
            assert policy == "template"
            assert turn.planned.prompt is None
        else:
            known = before.prompt + before.sampled
            assert turn.planned.parent == before.known.seq
            assert turn.prompt[: len(known)] == known
            suffix = turn.prompt[len(known) :]
            asked = talk.asked(talk.meant[: len(turn.asked.messages)])
            assert engine_ids(renderer, asked)[-len(suffix) :] == suffix
        before = turn


@settings(max_examples=50)
@given(data=st.data())
def test_the_short_look_sees_every_rewriting_that_the_whole_text_shows(
    chat_model: ChatModel, data: st.DataObject
) -> None:
    renderer = chat_model.renderer()
    talk = Conversation(data, chat_model, Loop(renderer, "preserve"), plain_text)
    for _ in range(data.draw(st.integers(1, 4))):
        talk.turn()
    last = talk.loop.turns[-1]
    at = len(last.asked.messages)
    history, new = talk.meant[:at], talk.meant[at + 1 :]
    answer = talk.meant[at]
    tools = renderer.tools(talk.tools, json.dumps(talk.tools))
    options = talk.fields.get("chat_template_kwargs", {})
    marker = "Nachgedacht" * 3
    is_inline = "</think>" in answer["content"]
    shown = {**answer, "reasoning": marker} if "reasoning" in answer else answer
    if is_inline:
        said = answer["content"].rpartition("</think>\n\n")[2]
        shown = {**answer, "content": f"<think>\n{marker}\n</think>\n\n{said}"}
    asked = talk.asked(history)
    whole = rendered(renderer, [*history, shown, *new], asked, generation_prompt=True)
    kept = whole.startswith(rendered(renderer, history, asked, generation_prompt=False)) and (
        shown is answer or marker in whole
    )
    shape = AnswerShape(
        has_reasoning=shown is not answer,
        is_inline=is_inline,
        thought_before=last.planned.known.thought_before,
        calls=tuple((call["id"], call["function"]["name"]) for call in answer.get("tool_calls", ())),
    )
    follows = renderer.continuation(talk.sent[:at], shape, new, tools, options)
    assert follows.keeps_history == kept
    assert whole.endswith(follows.text)


@settings(max_examples=50)
@given(data=st.data())
def test_untrusted_text_never_becomes_a_special_token(chat_model: ChatModel, data: st.DataObject) -> None:
    renderer = chat_model.renderer()
    assert renderer.protects
    talk = Conversation(data, chat_model, Loop(renderer, "preserve"), untrusted)
    turn = talk.turn()
    for _ in range(2):
        harmless = [
            {**message, "content": message["content"].replace("<", "(").replace("|", "!")}
            if message["role"] in ("user", "tool")
            else message
            for message in turn.asked.messages
        ]
        text = full_text(renderer, talk.asked(harmless))
        allowed = [i for i in renderer.encoder.encode(text) if renderer.encoder.added_token(i)]
        if turn.planned.rendering in ("local", "engine"):
            found = [i for i in turn.prompt if renderer.encoder.added_token(i)]
            assert found == allowed
        else:
            suffix = turn.prompt[-len(turn.planned.prompt or ()) :]
            basis = turn.planned.basis
            assert basis is not None
            known = len(TokenText((turn.planned.prompt or TokenText(b"")).text[: basis.size]))
            found = [i for i in suffix[known:] if renderer.encoder.added_token(i)]
            assert found == allowed[-len(found) :]
        turn = talk.turn()


@settings(max_examples=40)
@given(data=st.data())
def test_protection_changes_nothing_where_there_is_nothing_to_protect(
    chat_model: ChatModel, data: st.DataObject
) -> None:
    renderer = chat_model.renderer()
    talk = Conversation(data, chat_model, Loop(renderer), plain_text)
    turn = talk.turn()
    tools = renderer.tools(talk.tools, json.dumps(talk.tools))
    options = talk.fields.get("chat_template_kwargs", {})
    assert renderer.prompt(turn.asked.messages, tools, options) == engine_ids(renderer, turn.asked)


@settings(max_examples=40)
@given(text=untrusted)
def test_protected_text_reads_the_same(chat_model: ChatModel, text: str) -> None:
    encoder = chat_model.renderer().encoder
    ids = encoder.encode_marked(encoder.marked(text))
    plain = encoder.decode(encoder.encode(text)) if not encoder.holds_reserved(text) else text
    assert encoder.decode(ids) == plain
    assert not any(encoder.is_special(token) for token in ids)


@settings(max_examples=40)
@given(data=st.data())
def test_a_table_rebuilt_from_its_rows_plans_the_same(chat_model: ChatModel, data: st.DataObject) -> None:
    renderer = chat_model.renderer()
    loop = Loop(renderer, "preserve")
    talk = Conversation(data, chat_model, loop, plain_text)
    for _ in range(3):
        talk.turn()
    asked = talk.asked(list(talk.sent))
    expected = loop.plan(asked)
    rebuilt = ContinuityTable()
    assert rebuilt.restore(loop.rows) == 0
    assert {seq: call.ids for seq, call in rebuilt.calls.items()} == {
        seq: call.ids for seq, call in loop.table.calls.items()
    }
    loop.table = rebuilt
    assert loop.plan(asked) == expected
    assert conversation(asked.messages, knows_developer=True)
