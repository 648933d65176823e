"""Token trees and causes on a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from polar.core.cause_counts import CauseCounts
from polar.core.tree_outline import KINDS, UNTRAINABLE, Branch, causes_of, kind_of, outline
from polar.rewards.view import text_of
from schemas.trajectories import CallText, Trajectory
from schemas.trees import Split, StitchedCall

_STYLES = {
    "context": "dim", "agent": "green", "subagent": "cyan", "compaction": "magenta", "auxiliary": "blue",
    UNTRAINABLE: "red",
}  # fmt: skip
_ENDS = 2
_GUIDE = 4
"""Columns that a level of the tree takes."""
_LINE = 90
"""Columns for what stands on a line, at least."""


def print_tree(trajectory: Trajectory, characters: int) -> None:
    """One session: a line a branch, below it the calls that end there. `characters`: of a message's text."""
    found = outline(trajectory)
    console = Console(highlight=False)
    # A deep tree is wider than a terminal: better lines that the terminal breaks than columns of letters.
    console.width = max(console.width, _GUIDE * (_nesting(found.branches) + 2) + _LINE)
    texts = {text.call_id: text for text in trajectory.texts}
    title = Text(trajectory.session_id, style="bold")
    title.append(f"  {trajectory.outcome}, {trajectory.closed_by}", style="not bold")
    if trajectory.reason:
        title.append(f": {trajectory.reason}", style="not bold")
    console.print(title)
    sharing = found.naive_tokens / found.unique_tokens if found.unique_tokens else 1.0
    head = Text(
        f"{_plural(len(trajectory.calls), 'call')}, {_plural(len(found.branches), 'branch', 'branches')}, "
        f"{found.unique_tokens} tokens ({found.naive_tokens} one call at a time, {sharing:.1f} ×): "
    )
    head.append_text(_kinds(found.by_kind))
    console.print(head)
    nodes = {-1: Tree("", hide_root=True)}
    for branch in found.branches:
        node = nodes[branch.parent].add(_branch_line(branch))
        nodes[branch.run] = node
        for call in branch.calls:
            _add_call(node, call, texts.get(call.call_id), characters)
    for call in found.unplaced:
        _add_call(nodes[-1], call, texts.get(call.call_id), characters)
    console.print(nodes[-1])
    causes = causes_of(trajectory.calls)
    if causes:
        console.print("causes: " + ", ".join(f"{cause} {count}" for cause, count in causes.most_common()))
    for item in trajectory.listed:
        console.print(Text(f"listed: {item.id} {item.reason} {item.detail}".rstrip(), style="yellow"))
    console.print()


def print_causes(counts: Sequence[CauseCounts]) -> None:
    """A row a harness and model, a column a cause that occurs."""
    names = sorted({cause for count in counts for cause in count.causes})
    table = Table("harness", "model")
    for column in ("calls", "usable", "extending", *names):
        table.add_column(column, justify="right")
    for count in counts:
        numbers = (count.calls, count.usable, count.extending, *(count.causes[name] for name in names))
        table.add_row(count.harness or "unknown", count.model or "unknown", *map(str, numbers))
    Console(highlight=False).print(table)


def as_value(trajectory: Trajectory) -> dict[str, Any]:
    """The same as plain data."""
    found = outline(trajectory)
    return {
        "session_id": trajectory.session_id,
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "outcome": str(trajectory.outcome),
        "closed_by": trajectory.closed_by,
        "reason": trajectory.reason,
        "unique_tokens": found.unique_tokens,
        "naive_tokens": found.naive_tokens,
        "tokens_by_kind": found.by_kind,
        "causes": dict(causes_of(trajectory.calls)),
        "branches": [
            {
                "run": branch.run,
                "parent": branch.parent,
                "depth": branch.depth,
                "tokens": branch.tokens,
                "tokens_by_kind": branch.by_kind,
                "calls": [call.call_id for call in branch.calls],
            }
            for branch in found.branches
        ],
        "calls": [
            {
                "call_id": call.call_id,
                "seq": call.seq,
                "thread_id": call.thread_id,
                "kind": call.kind,
                "kind_rule": call.kind_rule,
                "run": call.end_run,
                "prompt_tokens": call.prompt_tokens,
                "sampled_tokens": call.sampled_tokens,
                "finish_reason": call.finish_reason,
                "untrainable": call.untrainable,
                "extends": call.extends,
                "splits": [split.model_dump(mode="json") for split in call.splits],
                "answer": text_of(text.answer),
            }
            for call, text in zip(trajectory.calls, trajectory.texts, strict=True)
        ],
        "listed": [item.model_dump(mode="json") for item in trajectory.listed],
    }


def _nesting(branches: Sequence[Branch]) -> int:
    """Branches on the longest way down."""
    levels = {-1: 0}
    for branch in branches:  # parents come first
        levels[branch.run] = levels[branch.parent] + 1
    return max(levels.values())


def _branch_line(branch: Branch) -> Text:
    line = Text(f"branch {branch.run}", style="bold")
    line.append(f"  {branch.depth}…{branch.depth + branch.tokens}  ", style="dim not bold")
    return line.append_text(_kinds(branch.by_kind))


def _kinds(by_kind: Mapping[str, int]) -> Text:
    return Text(", ").join(
        Text(f"{by_kind[kind]} {kind}", style=f"not bold {_STYLES[kind]}")
        for kind in KINDS
        if kind in by_kind
    )


def _add_call(node: Tree, call: StitchedCall, text: CallText | None, characters: int) -> None:
    kind = kind_of(call)
    line = Text(f"#{call.seq} ", style="bold")
    line.append(f"{call.kind} ", style=f"not bold {_STYLES.get(kind, '')}")
    if call.thread_id:
        line.append(f"[{call.thread_id}] ", style="not bold")
    line.append(f"{call.prompt_tokens} + {call.sampled_tokens} tokens", style="not bold")
    if call.extends is not None:
        line.append(f", extends #{call.extends}", style="not bold")
    if call.untrainable is not None:
        line.append(f", not trained: {call.untrainable}", style="not bold red")
    below = node.add(line)
    for split in call.splits:
        below.add(_split_line(split))
        if characters and (split.held_text or split.found_text):
            below.add(Text(f"was: {_short(split.held_text, characters)}", style="red"))
            below.add(Text(f"now: {_short(split.found_text, characters)}", style="yellow"))
    for said in _said(text, characters) if text is not None and characters else ():
        below.add(said)


def _split_line(split: Split) -> Text:
    line = Text(f"leaves #{split.against} at token {split.index}", style="yellow")
    if split.message is not None:
        line.append(f", in message {split.message}")
    line.append(": ").append(split.cause, style="bold")
    is_new = split.detail and split.detail != f"message {split.message}"
    return line.append(f" ({split.detail})") if is_new else line


def _short(text: str, characters: int) -> str:
    """The beginning of a text, line breaks as they are written in code."""
    plain = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return plain if len(plain) <= characters else plain[: characters - 1] + "…"


def _said(text: CallText, characters: int) -> Iterator[Text]:
    """The messages that are new with the call, of many the first and the last ones, and its answer."""
    new = text.new_messages
    shown = new if len(new) <= 2 * _ENDS else (*new[:_ENDS], None, *new[-_ENDS:])
    for message in shown:
        if message is None:
            yield Text(f"… {len(new) - 2 * _ENDS} more messages", style="dim italic")
        else:
            yield _message(str(message.get("role", "?")), message, characters, "dim")
    yield _message("→", text.answer, characters, "green")


def _message(who: str, message: Mapping[str, Any], characters: int, style: str) -> Text:
    said = " ".join([*text_of(message).split(), *(f"{name}(…)" for name in _called(message))])
    return Text(f"{who}: {_short(said, characters)}", style=style)


def _called(message: Mapping[str, Any]) -> Iterator[str]:
    """Names of the tools that a message calls, as far as it has the usual form."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, (list, tuple)) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        yield str(function.get("name", "?")) if isinstance(function, Mapping) else "?"


def _plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
