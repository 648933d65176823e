"""Does an engine render as the gateway does, and does it take prompts as ids?

| reason | what was seen |
|---|---|
| no_renderer | the gateway has no tokenizer and template, or none that can be continued |
| ignores_ids | the engine answered another prompt than the ids that it was sent |
| renders_differently | the engine made other ids of a probe conversation than the gateway |

Engines are asked for one token each time and tell the prompt's ids: nothing but that is believed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from polar.core.chat_template import Message, TemplateError
from polar.core.dialects.engine_answer import AnswerError, load_json
from polar.core.rendering import Renderer
from polar.gateway.engine import PROBE_HEADERS, EngineBrokenError, EngineClient, EngineStatusError

_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Runs a command – “quoted”.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "default": "ls <dir>"}, "n": {"type": "number"}},
            "required": ["command"],
        },
    },
}
_CALL: Mapping[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {
        "name": "run",
        "arguments": '{"command":"echo \\"Zürich\\" & 漢\\u00e9","n":1.0e2,"x":null}',
    },
}
_PLAIN: Sequence[Message] = (
    {"role": "system", "content": "You are terse. "},
    {"role": "user", "content": " Name a colour.\n\n"},
    {"role": "assistant", "content": "Blue 🙂", "reasoning": "Any will do."},
    {"role": "user", "content": "Another?"},
)
_WITH_TOOL: Sequence[Message] = (
    *_PLAIN,
    {"role": "assistant", "content": "", "tool_calls": [_CALL], "reasoning": "Look\nfirst."},
    {"role": "tool", "tool_call_id": "call00001", "content": "a.txt\n\tb <c> & 'd'\n"},
)


async def compare_rendering(engine: EngineClient, model: str, renderer: Renderer | None) -> str:
    """A reason of the module's table; empty when prompts may be sent as ids. Raises EngineError."""
    if renderer is None:
        return "no_renderer"
    compared: list[int] = []
    for messages, tools in ((_PLAIN, ()), (_WITH_TOOL, (_TOOL,))):
        try:
            ids = renderer.prompt(messages, renderer.tools(tools, f"probe of {len(tools)}"), {})
        except TemplateError:
            ids = []
        body: dict[str, Any] = {"messages": messages} | ({"tools": tools} if tools else {})
        theirs = await _prompt_ids(engine, model, body)
        if not theirs:
            continue  # refused, as every such request will be
        if theirs != ids:
            return "renders_differently"
        compared = ids
    if not compared:
        return "renders_differently"
    # An end that no template writes.
    shuffled = [*compared, *compared[-2:-10:-1]]
    body = {"messages": _PLAIN[-1:], "kv_transfer_params": {"prompt_token_ids": shuffled}}
    return "" if await _prompt_ids(engine, model, body) == shuffled else "ignores_ids"


async def _prompt_ids(engine: EngineClient, model: str, body: Mapping[str, Any]) -> list[int]:
    """The ids of the prompt that the engine answered; empty when it refuses the request."""
    asked = {"model": model, "max_tokens": 1, "return_token_ids": True, **body}
    async with engine.chat(asked, PROBE_HEADERS) as response:
        data = await response.read()
    if response.status in (400, 422):
        return []
    if response.status != 200:
        raise EngineStatusError(
            f"engine {engine.engine_id} answers {response.status} to a probe", response.status, data
        )
    try:
        answer = load_json(data)
    except AnswerError as error:
        raise EngineBrokenError(f"engine {engine.engine_id}: {error}") from error
    ids = answer.get("prompt_token_ids") if isinstance(answer, dict) else None
    return ids if isinstance(ids, list) else []
