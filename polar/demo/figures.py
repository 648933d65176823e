"""Small SVG figures without any external resource: line and bar plots, and a token tree."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 14, 30
COLORS = ("#2563eb", "#d97706", "#94a3b8", "#16a34a")


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one line (or one layer of bars); x is the index."""

    name: str
    values: Sequence[float]


def _tick(value: float) -> str:
    """A label that fits beside the axis."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _frame(title: str, top: float, labels: Sequence[str], body: str) -> str:
    grid = []
    for share in (0.0, 0.5, 1.0):
        y = _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - share)
        grid.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(top * share)}</text>'
        )
    for index, label in enumerate(labels):
        if len(labels) <= 12 or index % (len(labels) // 8) == 0:
            grid.append(
                f'<text x="{_x(index, len(labels)):.1f}" y="{HEIGHT - 10}" '
                f'text-anchor="middle">{label}</text>'
            )
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(grid)}{body}</svg></figure>"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _x(index: int, count: int) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * (index + 0.5) / max(count, 1)


def _y(value: float, top: float) -> float:
    return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - value / top)


def _legend(series: Sequence[Series]) -> str:
    parts, x = [], _LEFT + 4
    for index, item in enumerate(series):
        color = COLORS[index % len(COLORS)]
        parts.append(
            f'<rect x="{x}" y="2" width="9" height="9" fill="{color}"/>'
            f'<text x="{x + 13}" y="11">{html.escape(item.name)}</text>'
        )
        x += 24 + 7 * len(item.name)
    return "".join(parts) if len(series) > 1 else ""


def line_plot(title: str, series: Sequence[Series], *, top: float | None = None, markers: bool = True) -> str:
    """Lines over the index, from 0 to `top` (default: the largest value)."""
    count = max((len(item.values) for item in series), default=0)
    highest = top or max((value for item in series for value in item.values), default=1.0) or 1.0
    body = []
    for index, item in enumerate(series):
        color = COLORS[index % len(COLORS)]
        points = [(_x(i, count), _y(value, highest)) for i, value in enumerate(item.values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        if markers:
            body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
    labels = [str(i) for i in range(count)] if markers else []
    return _frame(title, highest, labels, "".join(body) + _legend(series))


def bar_plot(title: str, series: Sequence[Series]) -> str:
    """Stacked bars over the index."""
    count = max((len(item.values) for item in series), default=0)
    totals = [sum(values) for values in zip(*(item.values for item in series), strict=True)]
    highest = max(totals, default=1.0) or 1.0
    width = (WIDTH - _LEFT - _RIGHT) / max(count, 1) * 0.6
    body, floors = [], [0.0] * count
    for index, item in enumerate(series):
        for i, value in enumerate(item.values):
            y = _y(floors[i] + value, highest)
            height = _y(floors[i], highest) - y
            body.append(
                f'<rect x="{_x(i, count) - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}" fill="{COLORS[index % len(COLORS)]}"/>'
            )
            floors[i] += value
    return _frame(title, highest, [str(i) for i in range(count)], "".join(body) + _legend(series))


@dataclass(frozen=True, slots=True)
class TreeRun:
    """One run of a token tree, to be drawn: `parts` are (text, whether it was sampled)."""

    parent: int
    tokens: int
    parts: Sequence[tuple[str, bool]]


def tree_figure(title: str, runs: Sequence[TreeRun]) -> str:
    """The runs as nested boxes: a child stands below and right of its parent; sampled text is marked."""
    children: dict[int, list[int]] = {}
    for index, run in enumerate(runs):
        children.setdefault(run.parent, []).append(index)

    def draw(index: int) -> str:
        run = runs[index]
        text = "".join(
            f"<mark>{html.escape(part)}</mark>" if sampled else html.escape(part)
            for part, sampled in run.parts
        )
        below = "".join(draw(child) for child in children.get(index, []))
        return f'<li><div class="run"><span class="count">{run.tokens} tokens</span>{text}</div>' + (
            f"<ul>{below}</ul></li>" if below else "</li>"
        )

    roots = "".join(draw(index) for index in children.get(-1, []))
    caption = f"<figcaption>{html.escape(title)}</figcaption>"
    return f'<figure>{caption}<ul class="tree">{roots}</ul></figure>'
