"""Deltas of a chat answer → blocks that begin, grow and end one after the other.

Other protocols than chat number the parts of an answer and open and close each; a whole answer
is taken as one delta, so that streamed and unstreamed answers come out the same.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

BlockKind = Literal["reasoning", "text", "tool"]


@dataclass(slots=True)
class Block:
    """One part of an answer."""

    kind: BlockKind
    index: int
    """Its place in the answer."""
    call_id: str = ""
    name: str = ""
    """Of a tool, as the engine knows it."""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Reasoning, text or arguments so far."""
        return "".join(self.parts)


class Step(NamedTuple):
    """What happened to a block."""

    what: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one answer."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}

    @property
    def used_tools(self) -> bool:
        """Whether the model called a tool."""
        return bool(self._calls)

    def take(self, delta: dict[str, Any]) -> list[Step]:
        """A chunk's delta, or a whole message. Raises what `engine_answer.MALFORMED` lists."""
        steps: list[Step] = []
        if reasoning := delta.get("reasoning"):
            self._grow("reasoning", reasoning, steps)
        if content := delta.get("content"):
            self._grow("text", content, steps)
        for place, call in enumerate(delta.get("tool_calls") or ()):
            self._call(call, call.get("index", place), steps)
        return steps

    def close(self) -> list[Step]:
        """The end of the last block."""
        steps: list[Step] = []
        self._stop(steps)
        return steps

    def _grow(self, kind: BlockKind, text: str, steps: list[Step]) -> None:
        block = self._open
        if block is None or block.kind != kind:
            block = self._start(Block(kind, len(self.all)), steps)
        self._add(block, text, steps)

    def _call(self, call: dict[str, Any], index: int, steps: list[Step]) -> None:
        function = call.get("function") or {}
        block = self._calls.get(index)
        if block is None:
            block = Block("tool", len(self.all), str(call.get("id") or ""), str(function.get("name") or ""))
            self._calls[index] = self._start(block, steps)
        elif block is not self._open:
            raise ValueError(f"tool call {index} goes on after another one began")
        if arguments := function.get("arguments"):
            self._add(block, arguments, steps)

    def _start(self, block: Block, steps: list[Step]) -> Block:
        self._stop(steps)
        self._open = block
        self.all.append(block)
        steps.append(Step("start", block))
        return block

    @staticmethod
    def _add(block: Block, text: str, steps: list[Step]) -> None:
        if not isinstance(text, str):
            raise TypeError(f"a part of the answer is no text but {type(text).__name__}")
        block.parts.append(text)
        steps.append(Step("delta", block, text))

    def _stop(self, steps: list[Step]) -> None:
        if self._open is not None:
            steps.append(Step("stop", self._open))
            self._open = None
