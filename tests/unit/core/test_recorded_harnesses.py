"""Recorded loops of real agent programs, replayed against continuity with Qwen3's tokenizer.

Every answer is sampled in ids that no tokenizer would write. Each call must continue an earlier
one with every sampled id, or fork for a cause that is named.
"""

from collections import Counter

import pytest

from polar.core.continuity import Policy
from polar.core.rendering import Renderer
from tests import recorded_harnesses as recorded
from tests.chat_models import ChatModel
from tests.harness_loop import Loop, Message

FORKS = {"first", "edited", "compaction", "subagent", "restarted", "system_changed", "tools_changed"}
CONTINUING = {"extended", "drifted", "arguments_reserialized", "truncated"}


def written(renderer: Renderer, answer: Message, *, closed: bool) -> str:
    """What the model wrote: hermes calls with the arguments as they came, malformed ones too."""
    thought = f"<think>\n{answer['reasoning']}\n</think>\n\n" if "reasoning" in answer else ""
    parts = [answer["content"]] if answer["content"] else []
    for call in answer.get("tool_calls", ()):
        function = call["function"]
        body = f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return thought + "\n".join(parts) + (renderer.close if closed else "")


@pytest.mark.skipif(not recorded.FOLDER, reason=f"{recorded.MISSING}: recorded loops are NOT checked")
@pytest.mark.parametrize("policy", ["template", "preserve"])
def test_every_call_continues_with_every_sampled_id_or_forks_for_a_known_cause(
    qwen3_model: ChatModel, policy: Policy
) -> None:
    renderer = qwen3_model.renderer()
    relations: Counter[str] = Counter()
    kept = continuing = 0
    for harness in recorded.HARNESSES:
        for scenario, exchanges in recorded.sessions(harness):
            loop = Loop(renderer, policy)
            for exchange in exchanges:
                request = exchange.request
                common = {"tools": request.tools, "fields": request.fields}
                common |= {"thread_id": request.thread_id, "kind": request.kind}
                if exchange.answer is None:
                    loop.fail(request.messages, **common)
                    continue
                turn = loop.call(
                    request.messages,
                    exchange.answer,
                    text=written(renderer, exchange.answer, closed=exchange.finish_reason != "length"),
                    is_whole=exchange.is_whole,
                    finish_reason=exchange.finish_reason,
                    **common,
                )
                planned = turn.planned
                where = f"{harness} {scenario} {exchange.number}: {planned}"
                relations[planned.relation] += 1
                if planned.parent is None:
                    assert planned.relation in FORKS | {"retry", "truncated"}, where
                    continue
                continuing += 1
                parent = loop.by_seq[planned.parent]
                known = parent.prompt + parent.sampled
                kept += turn.prompt[: len(known)] == known
                assert planned.rendering in ("spliced", "repeated"), where
                assert planned.relation in CONTINUING | {"retry", "edited"}, where
    assert sum(relations.values()) > 200
    assert continuing > 100
    assert relations.keys() <= FORKS | CONTINUING | {"retry"}
    assert kept / continuing >= 0.999, (kept, continuing)
    assert sum(relations[name] for name in CONTINUING) > 100
