"""What a conversation looks like to the model: whole, and its continuation behind an answer.

The continuation is what the template writes behind the closing token of an answer, read off one
rendering in which the answer's own body is a sentinel. Only the messages that the template can
look back on from there are rendered: the present user turn and its last answers. From the same
rendering it is seen whether the template rewrites what came before (Qwen3 drops the thinking of
finished turns). Why and when this is exact: ARCHITECTURE.md, "Token-exact continuity".
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polar.core.chat_template import ChatTemplate, Message, RenderedTool, TemplateError
from polar.core.prompt_encoding import PromptEncoder
from polar.core.template_messages import conversation, template_tool

_MAX_TOOL_LISTS = 256
_LABELLED_TOKENS = 128
_MAX_SHAPES = 1024
_MAX_HARMLESS = 100_000
_CLIP = 128
"""Characters that are kept at either end of a message that is only looked back on."""
_END = 32
THINK_END = "</think>"
UNTRUSTED_ROLES = frozenset({"user", "tool"})


class UnsupportedTemplateError(ValueError):
    """No answer can be continued under this template; the message says why."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What the template must know of an answer to continue behind it; its texts do not matter."""

    has_reasoning: bool = False
    is_inline: bool = False
    """Its reasoning stands in its content: the engine does not part the two."""
    thought_before: bool = False
    """An earlier answer of the same user turn had reasoning, sent back by the harness or not."""
    calls: tuple[tuple[str, str], ...] = ()
    """(id, name) of the tool calls, as delivered."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows an answer."""

    text: str
    """Behind the closing token, up to the next answer; untrusted parts may be marked."""
    keeps_history: bool
    """The template leaves what came before as it was, this answer's reasoning included."""


class Renderer:
    """A chat template and its tokenizer. `nonce`: random letters and digits."""

    def __init__(
        self, template: ChatTemplate, encoder: PromptEncoder, *, nonce: str, protects: bool = True
    ) -> None:
        """`protects`: untrusted text never becomes a special token.

        Raises UnsupportedTemplateError.
        """
        self.template = template
        self.encoder = encoder
        self.protects = protects and encoder.protects
        self._body = f"zq{nonce}bodyzq"
        self._thought = f"zq{nonce}thoughtzq"
        self._keeps: dict[Hashable, bool] = {}
        """Whether the template keeps a history of this shape when it goes on in that one."""
        self._harmless: set[bytes] = set()
        """Marks of messages in which no untrusted text spells a special token."""
        self._tools: dict[str, tuple[RenderedTool, ...]] = {}
        self.close_id, self.close = self._closing()
        self.shows_call_ids = self._sees_call_ids()
        """The ids of tool calls stand in the text, so that another id is another conversation."""

    def tools(self, tools: Sequence[Mapping[str, Any]], digest: str) -> tuple[RenderedTool, ...]:
        """A tool list as the template gets it; `digest` names it."""
        known = self._tools.get(digest)
        if known is None:
            if len(self._tools) >= _MAX_TOOL_LISTS:
                self._tools.clear()
            known = self._tools[digest] = tuple(map(template_tool, tools))
        return known

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[RenderedTool], options: Mapping[str, Any]
    ) -> list[int]:
        """Ids of a whole conversation with generation prompt. Raises TemplateError."""
        text = self.template.render(
            self._conversation(messages, trusted=0), tools, generation_prompt=True, options=options
        )
        return self.encoder.encode_marked(text)

    def needs_protection(self, messages: Sequence[Message], marks: Sequence[bytes]) -> bool:
        """Whether untrusted text in these messages spells a special token. `marks`: of each message one
        that no other has; what was found harmless is known by it."""
        if not self.protects or self._harmless.issuperset(marks):
            return False
        if len(self._harmless) > _MAX_HARMLESS:
            self._harmless.clear()
        for message, mark in zip(messages, marks, strict=True):
            is_untrusted = message["role"] in UNTRUSTED_ROLES and mark not in self._harmless
            if is_untrusted and self.encoder.holds_reserved(message.get("content") or ""):
                return True
            self._harmless.add(mark)
        return False

    def continuation(
        self,
        history: Sequence[Message],
        answer: AnswerShape,
        new: Sequence[Message],
        tools: Sequence[RenderedTool],
        options: Mapping[str, Any],
    ) -> Continuation:
        """What follows an answer to `history` when `new` comes next. Raises TemplateError."""
        before = look_back(history, thought=answer.thought_before)
        try:
            return self._continuation(before, answer, new, tools, options)
        except TemplateError:
            # Some templates refuse a history with gaps.
            return self._continuation(history, answer, new, tools, options)

    def _continuation(
        self,
        before: Sequence[Message],
        answer: AnswerShape,
        new: Sequence[Message],
        tools: Sequence[RenderedTool],
        options: Mapping[str, Any],
    ) -> Continuation:
        messages = self._conversation([*before, self._masked(answer), *new], trusted=len(before) + 1)
        text = self.template.render(messages, tools, generation_prompt=True, options=options)
        body = text.rfind(self._body)
        close = text.find(self.close, body + len(self._body)) if body >= 0 else -1
        if close < 0:
            raise TemplateError("the chat template leaves out an answer, or does not close it")
        keeps = self._thought in text if answer.has_reasoning else True
        if keeps and before:
            shape = (_shape(before), answer, _shape(new), bool(tools), repr(options))
            known = self._keeps.get(shape)
            if known is None:
                if len(self._keeps) >= _MAX_SHAPES:
                    self._keeps.clear()
                plain = self._conversation(before, trusted=len(before))
                known = self._keeps[shape] = text.startswith(
                    self.template.render(plain, tools, generation_prompt=False, options=options)
                )
            keeps = known
        return Continuation(text[close + len(self.close) :], keeps)

    def is_canonical(self, sampled: list[int]) -> bool:
        """Whether the tokenizer itself would write the end of this text in these ids.

        The end, since a long answer would cost more than all else; it begins with a word.
        """
        start = max(0, len(sampled) - _LABELLED_TOKENS)
        while 0 < start < len(sampled) and not self._begins_word(sampled[start]):
            start += 1
        end = sampled[start:]
        return self.encoder.encode(self.encoder.decode(end)) == end

    def _begins_word(self, token_id: int) -> bool:
        text = self.encoder.decode([token_id])
        return len(text) > 1 and text[0] == " " and text[1].isalnum()

    def _conversation(self, messages: Sequence[Message], *, trusted: int) -> list[dict[str, Any]]:
        """For the template; untrusted texts behind the first `trusted` messages are marked."""
        if self.protects:
            messages = [
                self._protected(message) if index >= trusted else message
                for index, message in enumerate(messages)
            ]
        return conversation(messages, knows_developer=self.template.knows_developer)

    def _protected(self, message: Message) -> Message:
        if message["role"] not in UNTRUSTED_ROLES:
            return message
        content = message.get("content") or ""
        marked = self.encoder.marked(content)
        return message if marked is content else {**message, "content": marked}

    def _masked(self, answer: AnswerShape) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._body}
        if answer.is_inline:
            message["content"] = _inline(self._thought, self._body)
        elif answer.has_reasoning:
            message["reasoning"] = self._thought
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": {"s": self._body}},
                }
                for call_id, name in answer.calls
            ]
        return message

    def _closing(self) -> tuple[int, str]:
        """Id and text of the token that ends an answer in a history."""
        try:
            text = self.template.render(
                conversation([{"role": "user", "content": "u"}, self._masked(AnswerShape())],
                             knows_developer=True),
                (), generation_prompt=False, options={},
            )  # fmt: skip
        except TemplateError as error:
            raise UnsupportedTemplateError(str(error)) from error
        before, body, after = text.rpartition(self._body)
        ids = self.encoder.encode(after) if before and body else []
        if not ids:
            raise UnsupportedTemplateError("the chat template does not close an answer")
        token = self.encoder.added_token(ids[0])
        if token is None or not after.startswith(token.content):
            raise UnsupportedTemplateError(f"an answer ends in {after[:20]!r}, which is no added token")
        if token.lstrip or token.rstrip or token.single_word:
            raise UnsupportedTemplateError(f"the token {token.content!r} swallows text around it")
        return ids[0], token.content

    def _sees_call_ids(self) -> bool:
        call_id = "zq9Call0z"  # nine letters and digits: what the strictest templates accept
        call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {}}}
        messages: list[Message] = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "r", "tool_call_id": call_id},
        ]
        try:
            text = self.template.render(
                conversation(messages, knows_developer=True), (), generation_prompt=True, options={}
            )
        except TemplateError:
            return True  # it knows no tools: strictness costs nothing
        return call_id in text


def look_back(history: Sequence[Message], *, thought: bool) -> list[Message]:
    """The messages before an answer that a template's text behind it can depend on, clipped.

    System message, last user message, and behind that the last answer that thought and the last
    answer, each with the tool results that follow it. `thought`: one of them did, whatever the
    harness sent back.
    """
    last_user = next(
        (index for index in range(len(history) - 1, -1, -1) if history[index]["role"] == "user"), 0
    )
    chosen = {last_user} if history else set()
    if history and history[0]["role"] == "system":
        chosen.add(0)
    # One developer message moves all system messages to the front, later ones too.
    chosen |= {index for index, message in enumerate(history) if message["role"] == "developer"}
    answers = [index for index in range(last_user, len(history)) if history[index]["role"] == "assistant"]
    thinking = [index for index in answers if thinks(history[index])]
    for last in (answers[-1:], thinking[-1:]):
        for index in last:
            chosen.add(index)
            for behind in range(index + 1, len(history)):
                if history[behind]["role"] != "tool":
                    break
                chosen.add(behind)
    shown = [_clipped(history[index]) for index in sorted(chosen)]
    if thought and answers and not thinking:
        at = sorted(chosen).index(answers[-1])
        shown[at] = {**shown[at], "reasoning": "…"}
    return shown


def _shape(messages: Sequence[Message]) -> Hashable:
    """All of some messages by which a template may decide what of a history it takes back.

    Texts count by their ends: templates look for marks of thinking and of tool results there.
    """
    return tuple(
        [
            (
                message["role"],
                bool(message.get("reasoning")),
                len(message.get("tool_calls") or ()),
                message.get("name"),
                *_ends(message),
            )
            for message in messages
        ]
    )


def _ends(message: Message) -> tuple[Hashable, ...]:
    content = message.get("content") or ""
    if message["role"] == "user":
        return content[:_END], content[-_END:]
    return bool(content), message["role"] == "assistant" and THINK_END in content


def _clipped(message: Message) -> Message:
    content = message.get("content") or ""
    if len(content) <= 2 * _CLIP:
        return message
    if message["role"] == "assistant" and THINK_END in content:
        said = content.rpartition(THINK_END)[2].lstrip()
        return {**message, "content": _inline("…", said[-_CLIP:])}
    return {**message, "content": content[:_CLIP] + content[-_CLIP:]}


def _inline(thought: str, said: str) -> str:
    return f"<think>\n{thought}\n{THINK_END}\n\n{said}"


def thinks(answer: Message) -> bool:
    """Whether an answer shows reasoning, apart or in its content."""
    return bool(answer.get("reasoning")) or THINK_END in (answer.get("content") or "")
