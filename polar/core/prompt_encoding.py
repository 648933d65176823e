"""Text to ids and back with a model's tokenizer; untrusted text never becomes a special token.

A tool result that spells `<|im_end|>` would end its own turn: tokenizers find added tokens in any
text, and engines render a tool result like everything else. So each such text in untrusted content
gets a mark behind its first character before the template sees it. In the rendering the tokenizer
then finds only the template's own tokens; the stretches between those that hold marks are encoded
once more, without marks and without added tokens. Content without such text is not touched.
"""

import re
from collections.abc import Sequence

from tokenizers import AddedToken, Encoding, Tokenizer

from polar.core.chat_template import TemplateError


class PromptEncoder:
    """One tokenizer. `mark` is a word that occurs nowhere else: letters and digits, random."""

    def __init__(self, tokenizer: Tokenizer, *, template: str, mark: str) -> None:
        """`template`: added tokens that it spells are protected like special ones."""
        self._tokenizer = tokenizer
        self._mark = mark
        # The same model, normalizer and pre-tokenizer: shared, not copied.
        self._plain = Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._plain.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._plain.pre_tokenizer = tokenizer.pre_tokenizer
        self._added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        texts = sorted(
            (
                token.content
                for token in self._added.values()
                if token.special or (token.content in template and not token.content.isspace())
            ),
            key=len,
            reverse=True,
        )
        alternatives = "|".join(map(re.escape, texts)) or "(?!)"
        self._any = re.compile(alternatives)
        """Far faster than the look-ahead, and most text holds none of them."""
        # A look-ahead finds texts that overlap too.
        self._reserved = re.compile(f"(?=(?:{alternatives}))")
        self.protects = all(self._is_plain_text(text) for text in texts)
        """Whether every reserved text can be encoded as ordinary text with this tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of text whose reserved words are meant. Raises TemplateError for half a character."""
        return self._encoding(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def added_token(self, token_id: int) -> AddedToken | None:
        """The added token of this id."""
        return self._added.get(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether engines leave this id out of an answer's text."""
        token = self._added.get(token_id)
        return token is not None and token.special

    def holds_reserved(self, text: str) -> bool:
        """Whether a tokenizer would find a protected token in this text."""
        return self._any.search(text) is not None

    def marked(self, text: str) -> str:
        """Untrusted text with its reserved words broken up, for a rendering that `encode_marked` reads."""
        if self._any.search(text) is None:
            return text
        parts: list[str] = []
        last = 0
        for match in self._reserved.finditer(text):
            parts += [text[last : match.start() + 1], self._mark]
            last = match.start() + 1
        return "".join([*parts, text[last:]]) if parts else text

    def encode_marked(self, text: str) -> list[int]:
        """Ids of a rendering whose untrusted parts went through `marked`. Raises TemplateError."""
        encoding = self._encoding(text)
        if self._mark not in text:
            return encoding.ids
        ids: list[int] = []
        start, first = 0, 0
        """Begin of the present stretch: in the text, and among the ids."""
        found = encoding.ids
        for index, (token_id, (begin, end)) in enumerate(zip(found, encoding.offsets, strict=True)):
            if token_id in self._added:
                ids += self._stretch(text[start:begin], found[first:index])
                ids.append(token_id)
                start, first = end, index + 1
        return ids + self._stretch(text[start:], found[first:])

    def _encoding(self, text: str) -> Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except TypeError as error:
            # Arguments in JSON may spell half a surrogate pair, which no UTF-8 has.
            raise TemplateError(f"the conversation holds what is no text: {error}") from error

    def _stretch(self, text: str, ids: list[int]) -> list[int]:
        """Ids of text between added tokens, which the tokenizer read as `ids`, marks included."""
        if self._mark not in text:
            return ids
        return self._plain.encode(text.replace(self._mark, ""), add_special_tokens=False).ids

    def _is_plain_text(self, text: str) -> bool:
        ids = self._plain.encode(text, add_special_tokens=False).ids
        return len(text) > 1 and bool(ids) and not any(token_id in self._added for token_id in ids)
