"""The engines' tokenizer and chat template, read from a model folder.

What is read must be what the engines use; whether it is, the probe of each engine finds out.
"""

import json
import secrets
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from polar.core.chat_template import ChatTemplate, TemplateError
from polar.core.prompt_encoding import PromptEncoder
from polar.core.rendering import Renderer, UnsupportedTemplateError

_SPECIAL_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


class RendererError(ValueError):
    """No renderer can be made of this folder; the message says why."""


def load_renderer(folder: Path, chat_template: Path | None, *, protects: bool) -> Renderer:
    """The renderer of a Hugging Face folder. Takes up to a second. Raises RendererError.

    `chat_template`: a file in place of the folder's own, as engines are given one.
    """
    config = _json(folder / "tokenizer_config.json")
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:
        raise RendererError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    source = _template_source(folder, chat_template, config)
    nonce = secrets.token_hex(6)
    try:
        template = ChatTemplate(source, _special_tokens(folder, config), _strftime_now)
        encoder = PromptEncoder(tokenizer, template=source, mark=f"zq{nonce}zq")
        return Renderer(template, encoder, nonce=nonce, protects=protects)
    except (TemplateError, UnsupportedTemplateError) as error:
        raise RendererError(f"the chat template of {folder} cannot be continued: {error}") from error


def _template_source(folder: Path, chosen: Path | None, config: dict[str, Any]) -> str:
    file = chosen or folder / "chat_template.jinja"
    if chosen is not None or file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except OSError as error:
            raise RendererError(f"{file} cannot be read: {error}") from error
    named = config.get("chat_template")
    if isinstance(named, list):
        named = {entry.get("name"): entry.get("template") for entry in named}
    if isinstance(named, dict):
        if "tool_use" in named or "default" not in named:
            raise RendererError(
                f"{folder} has several chat templates ({', '.join(map(str, named))}); name the engines' one "
                "in POLAR_GATEWAY_CHAT_TEMPLATE"
            )
        named = named["default"]
    if not isinstance(named, str):
        raise RendererError(
            f"{folder} has no chat template; name the engines' one in POLAR_GATEWAY_CHAT_TEMPLATE"
        )
    return named


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens, which templates write by name."""
    older = folder / "special_tokens_map.json"
    entries = (_json(older) if older.is_file() else {}) | config
    tokens = {}
    for name in _SPECIAL_NAMES:
        value = entries.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RendererError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise RendererError(f"{file} holds no JSON object")
    return value


def _strftime_now(form: str) -> str:
    # Engines use their own local time.
    return datetime.now().strftime(form)  # noqa: DTZ005
