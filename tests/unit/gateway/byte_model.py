"""Tokenizer and chat template of the fake engine, as a model folder: one token per byte."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.unit.gateway.fake_engine import CLOSE, ROLES

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|close|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _characters() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def save_byte_model(folder: Path, *, template: str = TEMPLATE) -> Path:
    """Write the folder."""
    special = {f"<|{role}|>": token for role, token in ROLES.items()} | {"<|close|>": CLOSE}
    tokenizer = Tokenizer(models.BPE(vocab=_characters() | special, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": {"content": "<|close|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
