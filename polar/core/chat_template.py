"""A model's chat template as a function: messages and tools in, text out.

The environment is that of transformers' apply_chat_template, which engines call: a sandbox that
changes nothing it is given, trimmed blocks, loop controls, `generation` blocks, `tojson` without
HTML escapes, `raise_exception` and `strftime_now`. The clock is the caller's.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

Message = Mapping[str, Any]

_OWN_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "conversation"}
)
"""Set by whoever renders, never by a request's template options."""


_DICT_ATTRIBUTES = frozenset(dir(dict))
_PLAIN_TYPES = frozenset({str, jinja2.runtime.LoopContext, jinja2.utils.Namespace})


class TemplateError(ValueError):
    """The template is no template, or it refuses a conversation; the message is the template's own."""


class RenderedTool(dict[str, Any]):
    """A tool whose JSON text is written once, though every rendering shows it."""

    __slots__ = ("texts",)

    def __init__(self, tool: Mapping[str, Any]) -> None:
        super().__init__(tool)
        self.texts: dict[tuple[Any, ...], str] = {}


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`: marks for training masks, which change no text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, which decides once per type and name where objects cannot change the answer."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        self._is_safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A field of a message or a tool without the detour over attributes of dict."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """See the sandbox."""
        kind = type(obj)
        if kind not in _PLAIN_TYPES:
            return super().is_safe_attribute(obj, attr, value)
        known = self._is_safe.get((kind, attr))
        if known is None:
            known = self._is_safe[kind, attr] = super().is_safe_attribute(obj, attr, value)
        return known


class ChatTemplate:
    """One template, compiled."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], strftime_now: Callable[[str], str]
    ) -> None:
        """`special_tokens`: `bos_token` and the like, by name. Raises TemplateError."""
        environment = _Environment()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = strftime_now
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template cannot be read: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.knows_developer = '"developer"' in source or "'developer'" in source
        """Else engines render this role as `system`."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[RenderedTool],
        *,
        generation_prompt: bool,
        options: Mapping[str, Any],
    ) -> str:
        """The conversation as text. Raises TemplateError when the template refuses it."""
        known = {name: options[name] for name in options if name not in _OWN_VARIABLES}
        try:
            return self._template.render(
                **(self._special_tokens | known),
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=generation_prompt,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            # Templates assume types: a number where text is expected raises what Python raises.
            raise TemplateError(f"the chat template refuses the conversation: {error}") from error


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 -- templates call it by position too
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    if type(value) is not RenderedTool:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
    form = (ensure_ascii, indent, str(separators), sort_keys)
    text = value.texts.get(form)
    if text is None:
        text = value.texts[form] = json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
    return text
