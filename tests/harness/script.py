"""What the scripted model says: scenes of turns, and the faults on the way.

A scene is one conversation of a harness: its main agent, a sub-agent, a request for a title or
a summary. Its next turn is found by counting the tool results in the request, so that a request
that is repeated gets its turn again and any engine state is about faults only.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    tool: str
    arguments: str
    """JSON text as the model writes it, spaces and all; not JSON where that is the point."""


def tool_call(tool: str, **arguments: Any) -> ToolCall:
    """A call whose JSON is written with spaces that no harness would write."""
    members = " ,  ".join(
        f"{json.dumps(name)} :{json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items()
    )
    return ToolCall(tool, f"{{{members} }}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = "What is asked for is plain enough."
    is_cut: bool = False
    """The length limit ends it: no closing token."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The engine answers an error status."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = "scripted refusal"


CONTEXT_OVERFLOW = Refusal(
    400,
    message="This model's maximum context length is 32768 tokens. However, you requested 33000 tokens "
    "(32900 in the messages, 100 in the completion). Please reduce the length of the messages or completion.",
)


@dataclass(frozen=True, slots=True)
class BrokenStream:
    """The engine's connection breaks in the middle of an answer."""

    num_pieces: int = 4


Fault = Refusal | BrokenStream


class Conversation:
    """A request as a scene looks at it: by its prompt, since messages say nothing beside ids."""

    def __init__(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self.text = prompt
        """All that was said, in the form of the chat template."""
        self.tool_names: list[str] = [tool["function"]["name"] for tool in tools]
        self.num_tool_results = prompt.count("\n<tool_response>\n")


@dataclass(slots=True)
class Scene:
    """See the module."""

    name: str
    turns: Sequence["Turn | Callable[[Conversation], Turn]"]
    """A function where the turn depends on what was said before, e.g. on the id of a sub-agent."""
    fits: Callable[[Conversation], bool]
    faults: dict[int, list[Fault]] = field(default_factory=dict)
    """By turn: what happens, one after the other, before the turn is said."""
    dropped: set[int] = field(default_factory=set)
    """Turns that the harness takes out of its history and asks for anew: each is said once."""
    said: set[int] = field(default_factory=set)
    is_last: bool = False
    """Its last turn ends the run."""
    num_old_results: int | None = 0
    """Tool results that stood in the conversation before the scene; None: those of its first request."""

    def play(self, conversation: Conversation) -> tuple[int, Turn | Fault]:
        """(number of the turn, what happens now)."""
        if self.num_old_results is None:
            self.num_old_results = conversation.num_tool_results
        results = conversation.num_tool_results - self.num_old_results
        for number in range(len(self.turns)):
            gone = number in self.dropped and number in self.said
            turn = self.turn(number, conversation)
            if not gone and results < max(1, len(turn.calls)):
                break
            results -= 0 if gone else len(turn.calls)
        if waiting := self.faults.get(number):
            return number, waiting.pop(0)
        self.said.add(number)
        return number, turn

    def turn(self, number: int, conversation: Conversation) -> Turn:
        """What is said as this turn of this conversation."""
        turn = self.turns[number]
        return turn if isinstance(turn, Turn) else turn(conversation)


@dataclass(slots=True)
class Script:
    """All scenes; the first that fits a request plays."""

    scenes: list[Scene]

    @property
    def is_over(self) -> bool:
        """Whether the last turn of the last scene that ends a run was said."""
        return any(scene.is_last and len(scene.turns) - 1 in scene.said for scene in self.scenes)

    def scene(self, conversation: Conversation) -> Scene:
        """The scene of this request."""
        for scene in self.scenes:
            if scene.fits(conversation):
                return scene
        raise AssertionError(f"no scene for a request that ends with {conversation.text[-300:]!r}")
