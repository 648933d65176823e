"""polar.trajectories.v1."""

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.base import Event, WireModel
from schemas.sessions import Outcome
from schemas.tasks import SamplingSpec
from schemas.trees import ListedItem, StitchedCall, TokenTree

CallKind = Literal["agent", "subagent", "compaction", "auxiliary"]
HIGHEST_VOCABULARY = 2**31


class UsabilityRules(WireModel):
    """What a deployment trains; a replay goes by the rules that stand in the record."""

    train_kinds: tuple[CallKind, ...] = ("agent", "subagent", "compaction")
    """Kinds of calls that are trained; the others are kept, with the reason `auxiliary`."""
    vocabulary: Annotated[int, Field(gt=0, le=HIGHEST_VOCABULARY)] = HIGHEST_VOCABULARY
    """Ids from here on, and negative ones, are no tokens: `ids_invalid`. The default: not known."""
    trains_media: bool = False
    """Whether the trainer gets the pictures behind placeholder ids. Polar's own reads text only, so
    such a call is `media_untrained`."""


class CallText(WireModel):
    """The text side of a call, for reward programs and people."""

    call_id: str
    new_messages: tuple[dict[str, Any], ...]
    """Request messages that the call of the same session before it did not hold."""
    kept_messages: int
    """Leading messages shared with call `base_call`."""
    base_call: int | None
    answer: dict[str, Any]
    tools_digest: str


class Trajectory(Event):
    """One session as a tree: emitted once, when the session is sealed or abandoned."""

    type: Literal["Trajectory"] = "Trajectory"
    trajectory_id: str
    session_id: str
    group_id: str
    closed_by: Literal["sealed", "abandoned"]
    outcome: Outcome
    reason: str = ""
    declared_calls: int | None
    """Calls that the seal announced; none for an abandoned session."""
    sampling: SamplingSpec = SamplingSpec()
    tree: TokenTree
    calls: tuple[StitchedCall, ...]
    """All calls in order of seq, usable or not."""
    texts: tuple[CallText, ...]
    """Same order as `calls`."""
    tools: dict[str, tuple[dict[str, Any], ...]] = {}
    """Tool lists by digest."""
    listed: tuple[ListedItem, ...] = ()
    rules: UsabilityRules = UsabilityRules()
    """By which calls were judged."""
    algorithm: str
    """Version of the stitching algorithm; equal digests are promised per version."""
