"""OpenAI Responses: answers, whole and as events.

The tools of the request are not repeated in the answer (they may be tens of kilobytes, three times
a stream); everything else that a strict client requires is there. Item ids name the response,
so that a history tells which items were one turn.
"""

from typing import Any

import orjson

from polar.core.dialects.base import AskedTool, ModelRequest, answer_id
from polar.core.dialects.blocks import Block, Blocks, Step
from polar.core.dialects.engine_answer import Captured
from polar.core.dialects.errors import ApiError
from polar.core.dialects.responses_input import CUSTOM_INPUT
from polar.core.dialects.sealed import seal

_PREFIXES = {"function": "fc", "custom": "ctc", "local_shell": "lsh"}


def whole_response(request: ModelRequest, body: dict[str, Any], captured: Captured) -> dict[str, Any]:
    """The response of an unstreamed call. Raises what `engine_answer.MALFORMED` lists."""
    writer = _Writer(request, captured)
    writer.blocks.take(body["choices"][0]["message"])
    return writer.finished()


class ResponseEvents:
    """Events of a streamed call."""

    def __init__(self, request: ModelRequest, captured: Captured) -> None:
        self._writer = _Writer(request, captured)
        self._sequence = 0

    def on_chunk(self, chunk: dict[str, Any]) -> bytes:
        """See ClientStream."""
        out = bytearray()
        if self._sequence == 0:
            response = self._writer.response("in_progress", [])
            self._event(out, "response.created", response=response)
            self._event(out, "response.in_progress", response=response)
        for choice in chunk["choices"]:
            self._steps(out, self._writer.blocks.take(choice.get("delta") or {}))
        return bytes(out)

    def ending(self) -> bytes:
        """The end of the last item, and of the response: until then its tools are not run."""
        out = bytearray()
        self._steps(out, self._writer.blocks.close())
        response = self._writer.finished()
        self._event(out, f"response.{response['status']}", response=response)
        return bytes(out)

    def failure(self, error: ApiError) -> bytes:
        """`response.failed`."""
        code = error.code if error.is_context_overflow or error.status == 429 else "server_error"
        response = self._writer.response("failed", self._writer.items(closed_only=True))
        response["error"] = {"code": code, "message": error.message}
        out = bytearray()
        self._event(out, "response.failed", response=response)
        return bytes(out)

    def _event(self, out: bytearray, kind: str, **fields: Any) -> None:
        value = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        out += b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"

    def _steps(self, out: bytearray, steps: list[Step]) -> None:
        for step in steps:
            block = step.block
            index = block.index
            if step.what == "start":
                item = self._writer.item(block, done=False)
                self._event(out, "response.output_item.added", output_index=index, item=item)
                self._open_part(out, block, item["id"])
            elif step.what == "delta":
                self._delta(out, block, step.text)
            else:
                item = self._writer.item(block, done=True)
                self._close_part(out, block, item)
                self._event(out, "response.output_item.done", output_index=index, item=item)

    def _open_part(self, out: bytearray, block: Block, item_id: str) -> None:
        place = {"item_id": item_id, "output_index": block.index}
        if block.kind == "text":
            self._event(out, "response.content_part.added", **place, content_index=0, part=_text_part(""))
        elif block.kind == "reasoning":
            part = {"type": "summary_text", "text": ""}
            self._event(out, "response.reasoning_summary_part.added", **place, summary_index=0, part=part)

    def _delta(self, out: bytearray, block: Block, text: str) -> None:
        place = {"item_id": self._writer.item_id(block), "output_index": block.index}
        if block.kind == "text":
            self._event(out, "response.output_text.delta", **place, content_index=0, delta=text, logprobs=[])
        elif block.kind == "reasoning":
            self._event(out, "response.reasoning_summary_text.delta", **place, summary_index=0, delta=text)
        elif self._writer.asked(block).kind == "function":
            self._event(out, "response.function_call_arguments.delta", **place, delta=text)

    def _close_part(self, out: bytearray, block: Block, item: dict[str, Any]) -> None:
        place = {"item_id": item["id"], "output_index": block.index}
        if block.kind == "text":
            text = block.text
            self._event(out, "response.output_text.done", **place, content_index=0, text=text, logprobs=[])
            self._event(out, "response.content_part.done", **place, content_index=0, part=_text_part(text))
        elif block.kind == "reasoning":
            text = block.text
            self._event(out, "response.reasoning_summary_text.done", **place, summary_index=0, text=text)
            part = {"type": "summary_text", "text": text}
            self._event(out, "response.reasoning_summary_part.done", **place, summary_index=0, part=part)
        elif item["type"] == "function_call":
            self._event(
                out, "response.function_call_arguments.done", **place,
                name=item["name"], arguments=item["arguments"],
            )  # fmt: skip
        elif item["type"] == "custom_tool_call":
            # In one piece: the input is a JSON text of the engine, readable when it is whole.
            self._event(out, "response.custom_tool_call_input.delta", **place, delta=item["input"])
            self._event(out, "response.custom_tool_call_input.done", **place, input=item["input"])


class _Writer:
    """Blocks as items, and the response around them."""

    def __init__(self, request: ModelRequest, captured: Captured) -> None:
        self._request = request
        self._captured = captured
        self.blocks = Blocks()

    def finished(self) -> dict[str, Any]:
        """The response at its end."""
        finish = self._captured.choice(0).finish_reason
        is_whole = finish in ("stop", "tool_calls")
        response = self.response("completed" if is_whole else "incomplete", self.items(closed_only=False))
        if not is_whole:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = self._usage()
        return response

    def items(self, *, closed_only: bool) -> list[dict[str, Any]]:
        """The output; of a broken stream only what was closed."""
        blocks = self.blocks.all[:-1] if closed_only else self.blocks.all
        return [self.item(block, done=True) for block in blocks]

    def response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The response object."""
        echoed = self._request.echoed
        return {
            "id": f"resp_{self._suffix}",
            "object": "response",
            "created_at": self._captured.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": echoed["metadata"],
            "model": self._request.model,
            "output": output,
            "parallel_tool_calls": echoed["parallel_tool_calls"],
            "previous_response_id": None,
            "store": False,
            "text": echoed["text"],
            "tool_choice": echoed["tool_choice"],
            "tools": [],
            "usage": None,
        }

    def asked(self, block: Block) -> AskedTool:
        """The tool as the harness knows it; a name that nobody offered is passed on as it is."""
        return self._request.asked_tools.get(block.name) or AskedTool("function", block.name)

    def item_id(self, block: Block) -> str:
        """Names the response and the item's place."""
        if block.kind == "tool":
            prefix = _PREFIXES[self.asked(block).kind]
        else:
            prefix = "rs" if block.kind == "reasoning" else "msg"
        return f"{prefix}_{self._suffix}_{block.index}"

    def item(self, block: Block, *, done: bool) -> dict[str, Any]:
        """An output item, empty as long as it is not done."""
        item_id, status = self.item_id(block), "completed" if done else "in_progress"
        text = block.text if done else ""
        if block.kind == "text":
            content = [_text_part(text)] if done else []
            return {
                "id": item_id,
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": content,
            }
        if block.kind == "reasoning":
            summary = [{"type": "summary_text", "text": text}] if done else []
            item: dict[str, Any] = {"id": item_id, "type": "reasoning", "summary": summary}
            if self._request.echoed["seals_reasoning"]:
                item["encrypted_content"] = seal(text) if done else ""
            return item
        return {"id": item_id, "status": status, "call_id": block.call_id, **self._call(block, text)}

    def _call(self, block: Block, arguments: str) -> dict[str, Any]:
        asked = self.asked(block)
        if asked.kind == "local_shell":
            return {"type": "local_shell_call", "action": _shell_action(arguments)}
        call: dict[str, Any] = {"type": "function_call", "name": asked.name, "arguments": arguments}
        if asked.kind == "custom":
            call = {"type": "custom_tool_call", "name": asked.name, "input": _custom_input(arguments)}
        if asked.namespace:
            call["namespace"] = asked.namespace
        return call

    @property
    def _suffix(self) -> str:
        return answer_id(self._request, self._captured)

    def _usage(self) -> dict[str, Any]:
        captured = self._captured
        details = (captured.usage or {}).get("completion_tokens_details")
        reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else None
        return {
            "input_tokens": captured.prompt_tokens,
            "input_tokens_details": {"cached_tokens": captured.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": captured.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning if isinstance(reasoning, int) else 0},
            "total_tokens": captured.prompt_tokens + captured.completion_tokens,
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _custom_input(arguments: str) -> str:
    """The text argument; arguments of another shape are passed on as they are."""
    value = _json(arguments)
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _shell_action(arguments: str) -> dict[str, Any]:
    """The documented action; what is no such thing becomes a command that fails by its own text."""
    value = _json(arguments)
    fields = value if isinstance(value, dict) else {}
    command = fields.get("command")
    if not isinstance(command, list):
        command = [command if isinstance(command, str) else arguments]
    env = fields.get("env")
    action = {name: fields[name] for name in ("timeout_ms", "user", "working_directory") if name in fields}
    return {
        "type": "exec",
        "command": [str(part) for part in command],
        "env": env if isinstance(env, dict) else {},
        **action,
    }


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
