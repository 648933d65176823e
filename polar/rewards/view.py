"""A trajectory as reward programs like to see it: conversations and texts."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.sessions import Outcome
from schemas.trajectories import Trajectory

Message = Mapping[str, Any]


def text_of(message: Message) -> str:
    """The text of a message: its content, or the text parts of it, one a line."""
    content = message.get("content")
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


@dataclass(frozen=True, slots=True)
class CallView:
    """One model call."""

    call_id: str
    seq: int
    thread_id: str
    messages: tuple[Message, ...]
    """The whole conversation that the call sent."""
    answer: Message
    """The assistant's message as delivered."""
    tools: tuple[Mapping[str, Any], ...]
    finish_reason: str | None
    sampled_tokens: int
    untrainable: str | None
    """Why no token of it is trained; none for a usable call."""

    @property
    def text(self) -> str:
        """Text of the answer."""
        return text_of(self.answer)

    @property
    def tool_calls(self) -> tuple[Mapping[str, Any], ...]:
        """Tool calls of the answer."""
        return tuple(self.answer.get("tool_calls") or ())


class TrajectoryView:
    """One session with its calls in order."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.raw = trajectory
        """The event itself, with its token tree."""

    @property
    def session_id(self) -> str:
        """task/member/attempt/epoch."""
        return self.raw.session_id

    @property
    def group_id(self) -> str:
        """The task's id."""
        return self.raw.group_id

    @property
    def outcome(self) -> Outcome:
        """How the harness ended."""
        return self.raw.outcome

    @functools.cached_property
    def calls(self) -> tuple[CallView, ...]:
        """All calls by seq, with their whole conversations."""
        messages: dict[int, tuple[Message, ...]] = {}
        views = []
        for call, text in zip(self.raw.calls, self.raw.texts, strict=True):
            base = messages.get(text.base_call, ()) if text.base_call is not None else ()
            messages[call.seq] = (*base[: text.kept_messages], *text.new_messages)
            views.append(
                CallView(
                    call_id=call.call_id,
                    seq=call.seq,
                    thread_id=call.thread_id,
                    messages=messages[call.seq],
                    answer=text.answer,
                    tools=self.raw.tools.get(text.tools_digest, ()),
                    finish_reason=call.finish_reason,
                    sampled_tokens=call.sampled_tokens,
                    untrainable=call.untrainable,
                )
            )
        return tuple(views)

    @property
    def answers(self) -> tuple[str, ...]:
        """Texts of all answers in order."""
        return tuple(call.text for call in self.calls)

    @property
    def last_answer(self) -> str:
        """Text of the last answer; empty without calls."""
        return self.calls[-1].text if self.calls else ""

    @property
    def conversation(self) -> tuple[Message, ...]:
        """Messages of the last call, then its answer; empty without calls."""
        return (*self.calls[-1].messages, self.calls[-1].answer) if self.calls else ()
