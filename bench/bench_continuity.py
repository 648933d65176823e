"""CPU of continuing a call: the plan with its splice, what is remembered of it, and a full rendering.

A coding agent's session: a system prompt with ten tools, then answers of 200 sampled tokens with a tool
call each and tool results of about 150 tokens, up to 5,000 and 50,000 ids of history. The call that
is measured adds one tool result. `--model-path` names the folder of a tokenizer and chat template,
by default the demo's model.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.record import parser, record
from polar.core.answered_calls import answered
from polar.core.continuity import Asked, Plan, plan
from polar.core.continuity_table import ContinuityTable
from polar.core.rendering import Renderer
from polar.core.token_text import TokenText
from polar.gateway.renderer import load_renderer

Message = dict[str, Any]

_SAMPLED = "I look at the next part of the module, since the failing test names it. " * 9
_RESULT = "    def on_call(self, call):\n        return [event for event in self.events if event]\n" * 8
_TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Reads, writes or runs something in the repository. " * 5,
            "parameters": {
                "type": "object",
                "properties": {name: {"type": "string", "description": "A value."} for name in "abcdef"},
            },
        },
    }
    for number in range(10)
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and record; `argv` without the program's name."""
    commands = parser("continuity", __doc__)
    commands.add_argument("--model-path", type=Path)
    options = commands.parse_args(argv)
    renderer = load_renderer(options.model_path or _demo_model(), None, protects=True)
    figures: dict[str, Any] = {"model": (options.model_path or Path("smollm2")).name}
    for name, tokens in (("5k", 5_000), ("50k", 50_000)):
        figures |= {f"{what}_{name}": value for what, value in _measure(renderer, tokens).items()}
    record("continuity", figures, only_json=options.json)
    return 0


def _measure(renderer: Renderer, tokens: int) -> dict[str, float]:
    table, messages = _session(renderer, tokens)
    asked = Asked.of(messages, _TOOLS, {})
    planned = plan(table, asked, renderer, "template")
    if planned.rendering != "spliced" or planned.prompt is None:
        raise RuntimeError(f"the call was not spliced: {planned}")
    rows: list[bytes] = []

    def rebuild() -> None:
        ContinuityTable().restore(rows)

    table, messages = _session(renderer, tokens, rows)
    tools = renderer.tools(_TOOLS, "bench")
    prompt = planned.prompt
    ids = prompt.followed_by(TokenText.of([*prompt[:200], renderer.close_id]))
    table_bytes = table.size_bytes
    return {
        "ids": len(prompt),
        "messages": len(messages),
        "plan_cpu_us": 1e6 * _cpu_seconds(lambda: plan(table, asked, renderer, "template")),
        "full_render_cpu_us": 1e6 * _cpu_seconds(lambda: renderer.prompt(messages, tools, {}), repeats=3),
        "remember_cpu_us": 1e6 * _cpu_seconds(lambda: _remember(table, planned, prompt, ids, 10**6)),
        "rebuild_cpu_us": 1e6 * _cpu_seconds(rebuild),
        "row_bytes": statistics.median(map(len, rows)),
        "table_bytes": table_bytes,
    }


def _session(
    renderer: Renderer, tokens: int, rows: list[bytes] | None = None
) -> tuple[ContinuityTable, list[Message]]:
    """A table that knows all calls but the last, and the messages of the last."""
    table = ContinuityTable()
    messages: list[Message] = [
        {"role": "system", "content": "You repair programs. " * 60},
        {"role": "user", "content": "Make the tests pass. " * 20},
    ]
    seq = 0
    while True:
        seq += 1
        planned = plan(table, Asked.of(list(messages), _TOOLS, {}), renderer, "template")
        tools = renderer.tools(_TOOLS, "bench")
        ids = planned.prompt or TokenText.of(renderer.prompt(messages, tools, {}))
        if len(ids) >= tokens:
            return table, messages
        whole = ids.followed_by(TokenText.of([*ids[:200], renderer.close_id]))
        row = _remember(table, planned, ids, whole, seq)
        if rows is not None and row is not None:
            rows.append(row)
        messages += [_answer(seq), {"role": "tool", "tool_call_id": f"call_{seq}", "content": _RESULT}]


def _answer(seq: int) -> Message:
    function = {"name": "tool_1", "arguments": f'{{"a": "{seq}", "b": "src/module.py"}}'}
    calls = [{"id": f"call_{seq}", "type": "function", "function": function}]
    return {"role": "assistant", "content": _SAMPLED, "tool_calls": calls}


def _remember(
    table: ContinuityTable, planned: Plan, prompt: TokenText, ids: TokenText, seq: int
) -> bytes | None:
    """`ids`: prompt and 201 sampled ids."""
    known = answered(
        planned.known, seq, _answer(seq), is_whole=True, has_reasoning=False, call_ids=False,
        finish_reason="tool_calls", stop_reason=None,
        prompt=prompt, sampled_tokens=201,
    )  # fmt: skip
    return table.add(known, ids, planned.basis)


def _cpu_seconds(work: Callable[[], object], *, repeats: int = 25) -> float:
    """Median CPU time of this process in one call, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def _demo_model() -> Path:
    from polar.engines.model_cache import default_cache_dir
    from polar.engines.models import prepare_tiny_qwen3

    return prepare_tiny_qwen3(default_cache_dir())


if __name__ == "__main__":
    sys.exit(main())
