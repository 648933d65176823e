"""A model that says what it is told: real tokenizer, real chat template, forced token ids.

A text is cut at random places and each piece is encoded by itself, so the ids are almost never
those that the tokenizer would give the whole text. What a harness sends back and the template
renders anew therefore differs from what was sampled, as with a model that samples.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.script import Turn


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens that the engine streams together."""

    ids: tuple[int, ...]
    kind: str
    """`reasoning`, `content`, `arguments`, or `markup` (seen by nobody but the parser)."""
    text: str
    call: int = 0
    """Number of the tool call that it belongs to."""
    tool: str = ""
    """Name of the called tool, for `arguments`."""


class ScriptedModel:
    """Prompts and answers as token ids."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        from transformers import AutoTokenizer

        self.folder = folder
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._tokenizer.model_max_length = 1 << 30  # the engine's limit is another
        self._random = random.Random(seed)
        self.eos: int = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.thinks = "enable_thinking" in self._tokenizer.chat_template
        """Answers begin with a thinking block."""

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, **kwargs: Any
    ) -> list[int]:
        """Prompt ids, as an engine renders messages of the chat form."""
        text = self._tokenizer.apply_chat_template(
            [_for_template(message) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=True,
            tokenize=False,
            **kwargs,
        )
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """The canonical ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens written out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def sample(self, turn: Turn) -> list[Piece]:
        """The answer in pieces of a few tokens, without the closing token."""
        parts: list[tuple[str, str, int]] = []
        if self.thinks:
            parts += [("markup", "<think>\n", 0), ("reasoning", turn.reasoning, 0)]
            parts.append(("markup", "\n</think>\n\n", 0))
        if turn.text:
            parts.append(("content", turn.text, 0))
        for number, call in enumerate(turn.calls):
            if number or turn.text:
                parts.append(("content" if not number else "markup", "\n", number))
            parts.append(("markup", f'<tool_call>\n{{"name": {json.dumps(call.tool)}, "arguments": ', number))
            parts.append(("arguments", call.arguments, number))
            parts.append(("markup", "}\n</tool_call>", number))
        return [
            Piece(
                tuple(self.encode(text)), kind, text, number,
                turn.calls[number].tool if kind == "arguments" else "",
            )
            for kind, whole, number in parts
            for text in self._cut(whole)
        ]  # fmt: skip

    def _cut(self, text: str) -> list[str]:
        pieces = []
        while text:
            length = self._random.choice((1, 2, 3, 4, 6, 9))
            pieces.append(text[:length])
            text = text[length:]
        return pieces


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """The form that vLLM gives its templates: texts joined, arguments as mappings."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    message = {**message, "content": content or ""}
    if message["role"] == "developer":
        message["role"] = "system"
    if "reasoning" in message:
        message["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _mapping(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return message


def _mapping(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return {}
